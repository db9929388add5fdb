"""The memory of many engines in one process while rows are written to all of them, by budget.

    python -m loadtest.bench.engine_memory [--engines 120] [--mib 256,64,4096] [--mb 700]

Each budget has its own process. It writes the given number of MB in rows of 1,000 random bytes, 100 rows to one
engine after the other, and prints its maximum resident memory. With a budget of 4,096 MiB nothing is flushed because
of the budget, so that figure shows what the engines take by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from kvstore.partition.state.engine import wait_caught_up
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.rocks_memory import RocksMemory

ROWS, ROW_BYTES = 100, 1000
"""Number of rows written to an engine together, and size of a row in bytes."""


async def fill(folder: Path, engines: int, mib: int, mb: int) -> str:
    """Write the rows, and return the memory that this took."""
    memory, random = RocksMemory(mib << 20), Random(1)
    all_ = [RocksEngine(str(folder / str(number)), memory=memory) for number in range(engines)]
    opened, most, began = resident_mb(), 0, time.monotonic()
    for turn in range(mb * 1_000_000 // (ROWS * ROW_BYTES)):
        engine = all_[turn % engines]
        await wait_caught_up(engine)
        batch = engine.batch()
        for _ in range(ROWS):
            batch.put(random.randbytes(16), random.randbytes(ROW_BYTES))
        engine.write(batch)
        if not turn % engines:
            most = max(most, resident_mb())
    took = time.monotonic() - began
    for engine in all_:
        engine.close()
    return (
        f"{mib} MiB for {engines} engines: {opened} MB when opened, {most} MB at most, {memory.flushes} flushes for "
        f"memory, {mb / took:.0f} MB/s"
    )


def resident_mb() -> int:
    """Return the resident memory of this process in MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) // 1000 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=120)
    parser.add_argument("--mib", default="256,64,4096")
    parser.add_argument("--mb", type=int, default=700)
    words = parser.parse_args()
    budgets = words.mib.split(",")
    if len(budgets) == 1:
        with TemporaryDirectory(dir=Path.cwd()) as folder:
            print(asyncio.run(fill(Path(folder), words.engines, int(budgets[0]), words.mb)))
        return
    for each in budgets:
        command = [sys.executable, "-m", "loadtest.bench.engine_memory", "--mib", each]
        subprocess.run([*command, "--engines", str(words.engines), "--mb", str(words.mb)], check=True)


if __name__ == "__main__":
    main()
