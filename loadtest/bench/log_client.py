"""How fast our log client writes one ledger to three real bookies, beside Apache's Java client on the same bookies.

    python -m loadtest.bench.log_client [--rounds 3] [--seconds 4] [--size 1024] [--in-flight 1 100 1000]

ZooKeeper and three bookies of ours are processes of their own; each client is one more, and writes 3/3/2 with so many
adds in flight. The clients take turns. Each line is the median of the rounds: adds confirmed per second, and the
processor time per add of the client and of the three bookies together. Apache's client takes part if its jars are there
(`python -m tests.interop.apache --install`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kvstore.env.real import run
from kvstore.errors import StoreError
from kvstore.types import LedgerId, PartitionId, Position
from kvstore.wal.handle import LedgerHandle
from tests.interop import java
from tests.interop.processes import Processes
from tests.interop.python_client import client

WRITE = "write"
"""The first word of the command line that is one client alone."""
LATE_S = 120.0
WARM_S = 8.0
"""Not counted: Java compiles meanwhile."""


class Load:
    """Keeps so many adds in flight on one ledger."""

    def __init__(self, handle: LedgerHandle, window: int, size: int) -> None:
        self.confirmed = 0
        self._handle = handle
        self._window = window
        self._payload = os.urandom(size)
        self._is_over = False

    def start(self) -> None:
        for _ in range(self._window):
            self._handle.append(self._payload, self._done)

    def _done(self, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        assert error is None, error
        self.confirmed += 1
        if not self._is_over:
            self._handle.append(self._payload, self._done)

    async def stop(self) -> None:
        self._is_over = True
        await self._handle.drained()


async def write(zookeeper: str, window: int, size: int, seconds: float, warm_s: float) -> None:
    """Be the client, and say how it went."""
    async with client(zookeeper) as (env, ports, creator):
        metadata = await creator.create(PartitionId("p1"), LedgerId(-1))
        halted: list[StoreError] = []
        handle = LedgerHandle(metadata, ports, env.nursery, on_halt=halted.append)
        load = Load(handle, window, size)
        load.start()
        await asyncio.sleep(warm_s)
        began, spent, confirmed = time.perf_counter(), time.process_time(), load.confirmed
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        await asyncio.sleep(seconds)
        figures = {
            "adds": load.confirmed - confirmed,
            "took_s": time.perf_counter() - began,
            "cpu_s": time.process_time() - spent,
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
        await load.stop()
        await handle.close()
        last = (await ports.ledgers.read(metadata.ledger))[0].last_entry
        assert not halted, halted
        assert last == load.confirmed - 1, (last, load.confirmed)


def spent_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_run(cluster: Processes, command: Sequence[str]) -> dict[str, float]:
    """Run a client, and read from it when it has begun and what it did."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    bookies = [bookie.process.pid for bookie in cluster.bookies]
    try:
        async with asyncio.timeout(LATE_S):
            while (line := await process.stdout.readline()).strip() != b"begun":
                assert line, "the client ended"
            before = sum(map(spent_s, bookies))
            while not (line := await process.stdout.readline()).startswith(b"{"):
                assert line, "the client ended"
            figures = json.loads(line)
            after = sum(map(spent_s, bookies))
            await process.communicate()
        assert process.returncode == 0, f"the client ended with {process.returncode}"
    except BaseException:
        process.kill()
        raise
    adds = figures["adds"]
    return {
        "per_s": adds / figures["took_s"],
        "client_us": figures["cpu_s"] / adds * 1e6,
        "bookies_us": (after - before) / adds * 1e6,
    }


async def compare(
    directory: Path, *, in_flight: Sequence[int], size: int, seconds: float, rounds: int, warm_s: float = WARM_S
) -> None:
    async with Processes(directory, 3) as cluster:
        for window in in_flight:
            numbers = [str(each) for each in (window, size, seconds, warm_s)]
            commands = {"ours": [sys.executable, "-m", __spec__.name, WRITE, cluster.zookeeper.address, *numbers]}
            if java.is_installed():
                theirs = cluster.session("Load", *numbers)
                commands["Apache's"] = [word for word in theirs if word != java.QUICK]
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
            for _ in range(rounds):
                for name, command in commands.items():
                    runs[name].append(await one_run(cluster, command))
            for name, figures in runs.items():
                middle = {key: median(each[key] for each in figures) for key in figures[0]}
                print(
                    f"{window:5d} in flight, {size} B, {name:8s}: {middle['per_s']:8,.0f} adds/s, "
                    f"{middle['client_us']:6.1f} us of the client, {middle['bookies_us']:6.1f} us of the bookies",
                    flush=True,
                )


def run_bench(*, in_flight: Sequence[int], size: int, seconds: float, rounds: int) -> None:
    """Measure, and print."""
    if java.is_installed():
        java.compile_sessions()
    with tempfile.TemporaryDirectory(prefix="bench-log-client-") as directory:
        asyncio.run(compare(Path(directory), in_flight=in_flight, size=size, seconds=seconds, rounds=rounds))


def main() -> None:
    if sys.argv[1:2] == [WRITE]:  # the process of our client
        zookeeper, window, size, seconds, warm_s = sys.argv[2:]
        run(write(zookeeper, int(window), int(size), float(seconds), float(warm_s)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 100, 1_000])
    parser.add_argument("--size", type=int, default=1_024)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    run_bench(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
