"""Measure the cost of the index of a bookie with many entries: memory, disk and time.

    python -m loadtest.bench.index_memory COUNT [--dir DIR] [--size 1024] [--ledger 200000]

The inventory of a bookie (inventory.py) receives COUNT entries of SIZE bytes as from its journal, one ledger after the
other, and writes its index files with the real code. The packets themselves are not written, and the segments are
sparse files with a header. Then a separate process starts from the directory and looks entries up at random and in
order. `--holes` gives the bookie two entries of three, like a bookie of a striped ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.index.index_files import IndexFiles
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.record import (
    FILE_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    FileHeader,
    GroupHeader,
    encode_file_header,
    encode_group_header,
)
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.opening import make_directory
from kvstore.bookie.replay import replay
from kvstore.env import Env
from kvstore.env.real import real_env, run
from kvstore.loadtest.generator.options import path_word
from tests.waiting import wait_until

CONFIG = BookieConfig(name="bench")
PROBES = 20_000


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ids(count: int, per_ledger: int, *, holes: bool) -> Iterator[tuple[int, int]]:
    """Yield ledger and entry ids in the order in which the entries are stored."""
    for number in range(count):
        ledger, entry = divmod(number, per_ledger)
        yield ledger + 1, entry * 3 // 2 if holes else entry


async def fill(env: Env, count: int, size: int, per_ledger: int, *, holes: bool) -> None:
    """Write the directory, one segment at a time."""
    for directory in (CONFIG.journal_dir, CONFIG.index_dir):
        make_directory(env.disk, directory)
    inventory = Inventory(IndexFiles(env.disk, CONFIG.index_dir))
    before, began, closing = resident_bytes(), time.perf_counter(), list[float]()
    segment, offset = _begin(env, inventory, 1), FILE_HEADER_SIZE
    for ledger, entry in ids(count, per_ledger, holes=holes):
        if offset + RECORD_HEADER_SIZE + size > CONFIG.segment_bytes:
            closing.append(-time.process_time())
            _end(inventory, segment, offset)
            closing[-1] += time.process_time()
            segment, offset = _begin(env, inventory, segment.file + 1), FILE_HEADER_SIZE
            await asyncio.sleep(0)
        inventory.stored(segment, inventory.known(ledger, b"k" * 20), entry, offset, size)
        offset += RECORD_HEADER_SIZE + size
    _end(inventory, segment, offset)

    async def is_written() -> bool:
        return not inventory.index_files.in_memory

    await wait_until(is_written, what="index files on the disk")
    took, grown = time.perf_counter() - began, resident_bytes() - before
    written = sum(path.stat().st_size for path in Path(env.disk.real_path(CONFIG.index_dir)).iterdir())
    print(
        f"{count:,} entries of {size} bytes in {segment.file} segments and {len(inventory.ledgers)} ledgers: stored "
        f"in {took:.1f} s\n"
        f"memory while it fills: {grown / 1e6:.1f} MB, {grown / count:.3f} bytes an entry\n"
        f"index files: {written / 1e6:.1f} MB, {written / count:.2f} bytes an entry; processor time for one: "
        f"{1e3 * sorted(closing)[len(closing) // 2]:.1f} ms, {1e3 * max(closing):.1f} at the most",
        flush=True,
    )


def _begin(env: Env, inventory: Inventory, file: int) -> Segment:
    header = FileHeader(file, env.random.getrandbits(64) | 1)
    segment = Segment(
        env.disk, CONFIG.journal_dir, header, capacity=CONFIG.segment_bytes, open_files=inventory.open_files
    )
    handle = env.disk.open(segment.path, create=True)
    handle.pwrite(0, encode_file_header(header))
    group = GroupHeader(file, 0, file, file - 1, 0)
    handle.pwrite(FILE_HEADER_SIZE, encode_group_header(group, header.salt, FILE_HEADER_SIZE))
    handle.close()
    inventory.segments[file] = segment
    return segment


def _end(inventory: Inventory, segment: Segment, end: int) -> None:
    segment.end = end
    inventory.index_files.write(inventory.close(segment, segment.file))


async def start(env: Env, count: int, per_ledger: int, *, holes: bool) -> None:
    """Read the directory as a start does, then look entries up."""
    before, began = resident_bytes(), time.perf_counter()
    inventory = replay(env.disk, CONFIG.journal_dir, CONFIG.index_dir).inventory
    took, grown = time.perf_counter() - began, resident_bytes() - before
    print(f"start: {took:.2f} s; memory after it: {grown / 1e6:.1f} MB, {grown / count:.3f} bytes an entry")
    random, ledgers = Random(1), inventory.ledgers

    def anywhere() -> tuple[int, int]:
        ledger, entry = divmod(random.randrange(count), per_ledger)
        return ledger + 1, entry * 3 // 2 if holes else entry

    _time("looked up at random", inventory, anywhere)
    in_order = ids(count, per_ledger, holes=holes)
    _time("looked up in order", inventory, lambda: next(in_order))
    began = time.perf_counter()
    runs = ledgers[1].index.runs()
    print(f"list of a ledger's entries: {1e3 * (time.perf_counter() - began):.2f} ms, {len(runs)} runs")
    grown = resident_bytes() - before
    print(f"memory after all that: {grown / 1e6:.1f} MB, {grown / count:.3f} bytes an entry")


def _time(what: str, inventory: Inventory, draw: Callable[[], tuple[int, int]]) -> None:
    took, reads = [], inventory.index_files.blocks_read
    for _ in range(PROBES):
        ledger, entry = draw()
        began = time.perf_counter()
        place, _ = inventory.ledgers[ledger].index.get(entry)
        took.append(time.perf_counter() - began)
        assert place, f"ledger {ledger} entry {entry} is not found"
    took.sort()
    reads = inventory.index_files.blocks_read - reads
    print(
        f"{what}: p50 {1e6 * took[PROBES // 2]:.1f} us, p99 {1e6 * took[PROBES * 99 // 100]:.1f} us, "
        f"{reads / PROBES:.3f} reads of a block each"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="memory, disk and time of a bookie's index")
    parser.add_argument("count", type=int)
    parser.add_argument(
        "--dir", type=path_word, default=None, help="where the directory is made; default: the system's"
    )
    parser.add_argument("--size", type=int, default=1024, help="bytes of a packet")
    parser.add_argument("--ledger", type=int, default=200_000, help="entries of a ledger")
    parser.add_argument("--holes", action="store_true", help="two entries of three")
    parser.add_argument("--started", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.started:
        env = real_env(Path(options.started))
        run(start(env, options.count, options.ledger, holes=options.holes))
        return
    directory = Path(tempfile.mkdtemp(prefix="index-memory-", dir=options.dir))
    try:
        run(fill(real_env(directory), options.count, options.size, options.ledger, holes=options.holes))
        command = [sys.executable, "-m", "loadtest.bench.index_memory", *sys.argv[1:], "--started", str(directory)]
        subprocess.run(command, check=True)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
