"""Measure the cost of a partition per operation: python -m loadtest.bench.partition [--profile] [CASE …].

A leader runs over RocksDB and a log that acknowledges at once: it decides, encodes, applies and answers, without a
network, bookies or servers. The figures are microseconds of processor time per operation, including background threads
of the engine: minimum, median and mean of short rounds. The machine may be shared, so the yardstick (a fixed piece of
work in Python and C) shows its speed at that time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, cast

import uvloop

from kvstore.env import Env
from kvstore.env.clock import SystemClock
from kvstore.errors import StoreError
from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.leader import Leader
from kvstore.partition.state.commands import Get, Op, Put, RequestId, Sink
from kvstore.partition.state.engine_rocks import RocksEngine
from kvstore.partition.state.entry import decode
from kvstore.partition.state.state import ReplicaState
from kvstore.ring.hashing import MURMUR3
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.ports import AppendDone, LogEntry

P1 = PartitionId("p1")
KEYS = 350_000
ROUNDS = 40


class InstantLog:
    """Acknowledges in the next turn of the event loop."""

    epoch = 1
    waited = True
    recovered_end = Position(LedgerId(0), EntryId(0))

    def __init__(self, clock: SystemClock) -> None:
        self.payloads: list[bytes] = []
        self._clock = clock
        self._loop = asyncio.get_running_loop()

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        position = Position(LedgerId(1), EntryId(len(self.payloads)))
        self.payloads.append(payload)
        self._loop.call_soon(done, position, self._clock.now(), None)

    def close_for_good(self) -> None:
        pass

    async def seal(self) -> None:
        pass

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        return 0

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        pass


class Counter(Sink):
    """A sink that counts results, and wakes the caller that waits for a number of them."""

    def __init__(self) -> None:
        self.left = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Any) -> None:
        assert not isinstance(result, StoreError), result
        self.left -= 1
        if self.left == 0:
            self.done.set_result(None)

    def flush(self) -> None:
        pass

    async def wait(self, count: int) -> None:
        self.left = count
        self.done = asyncio.get_running_loop().create_future()
        await self.done


class Bench:
    """One leader on a fresh engine."""

    def __init__(self, directory: Path) -> None:
        clock = SystemClock()
        self.config = PartitionConfig()
        self.engine = RocksEngine(str(directory / "leader"))
        self.state = ReplicaState(P1, self.engine, self.config, MURMUR3)
        self.log = InstantLog(clock)
        none = cast(Any, None)
        env = Env(clock=clock, random=Random(0), transport=none, disk=none, nursery=none, fatal=print)
        self.leader = Leader(env, self.config, self.state, self.log, print)
        self.sink = Counter()
        self.random = Random(1)

    async def run(self, ops: list[Op], batch: int) -> None:
        """Submit `ops`, a fixed number at a time."""
        submit, sink = self.leader.submit, self.sink
        for start in range(0, len(ops), batch):
            some = ops[start : start + batch]
            for op in some:
                submit((op,), sink, (0,))
            await sink.wait(len(some))

    def keys(self, count: int) -> Iterator[bytes]:
        return (b"key:%012d" % self.random.randrange(KEYS) for _ in range(count))

    def puts(self, count: int, size: int = 100) -> list[Op]:
        return [Put(key, b"x" * size) for key in self.keys(count)]

    def puts_with_ids(self, count: int) -> list[Op]:
        client, seen = self.random.randbytes(16), int(time.time() * 1000)
        return [
            Put(key, b"x" * 100, request=RequestId(client, number, max(1, number - 200), seen))
            for number, key in enumerate(self.keys(count), 1)
        ]

    def gets(self, count: int) -> list[Op]:
        return [Get(key) for key in self.keys(count)]


async def costs(bench: Bench, make: Callable[[], list[Op]], batch: int) -> tuple[float, float, float]:
    """Return the microseconds of CPU per operation: minimum, median, mean."""
    rounds = []
    for _ in range(ROUNDS):
        ops = make()
        began = time.process_time()
        await bench.run(ops, batch)
        rounds.append((time.process_time() - began) / len(ops) * 1e6)
    return min(rounds), median(rounds), mean(rounds)


def yardstick() -> tuple[float, float]:
    """Return the microseconds for a fixed piece of work: minimum and median. About 20 on an idle core of 2024."""
    rounds = []
    for _ in range(200):
        began = time.process_time()
        table = {number: b"%d" % number for number in range(100)}
        b"".join(table.values())
        rounds.append((time.process_time() - began) * 1e6)
    return min(rounds), median(rounds)


def replica_apply(bench: Bench, directory: Path) -> float:
    """Decode and apply everything that the leader has logged."""
    state = ReplicaState(P1, RocksEngine(str(directory / "replica")), bench.config, MURMUR3)
    entries = [LogEntry(Position(LedgerId(1), EntryId(n)), payload) for n, payload in enumerate(bench.log.payloads)]
    began = time.process_time()
    for entry in entries:
        state.apply(entry)
    return (time.process_time() - began) / max(1, state.seq) * 1e6


def codec(bench: Bench) -> tuple[float, float]:
    """Return the microseconds per 100 mutations: to encode, to decode."""
    payload = next(each for each in reversed(bench.log.payloads) if len(decode(each).keys) == 100)
    entry, count = decode(payload), 2000
    began = time.process_time()
    for _ in range(count):
        entry.encode()
    middle = time.process_time()
    for _ in range(count):
        decode(payload)
    return (middle - began) / count * 1e6, (time.process_time() - middle) / count * 1e6


CASES: dict[str, tuple[Callable[[Bench], list[Op]], int]] = {
    "put, batch 100": (lambda b: b.puts(2_000), 100),
    "put, batch 32": (lambda b: b.puts(2_000), 32),
    "put, batch 1": (lambda b: b.puts(200), 1),
    "put 1 KB, batch 100": (lambda b: b.puts(1_000, 1024), 100),
    "put with request id, batch 100": (lambda b: b.puts_with_ids(2_000), 100),
    "get, batch 100": (lambda b: b.gets(4_000), 100),
    "get, batch 1": (lambda b: b.gets(500), 1),
}


async def main(names: list[str], *, profiled: bool) -> None:
    directory = Path(tempfile.mkdtemp(prefix="bench_partition"))
    bench = Bench(directory)
    start = asyncio.get_running_loop().create_task(bench.leader.start())
    await start
    try:
        await bench.run(bench.puts(100_000), 500)
        for name in names or CASES:
            make, batch = CASES[name]
            profile = cProfile.Profile()
            if profiled:
                profile.enable()
            least, middle, average = await costs(bench, lambda make=make: make(bench), batch)  # type: ignore[misc]
            profile.disable()
            print(f"{name:32} {least:6.2f} {middle:6.2f} {average:6.2f} µs")
            if profiled:
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        print(f"{'replica: decode and apply':32} {replica_apply(bench, directory):6.2f} µs")
        print("{:32} {:6.2f} {:6.2f} µs".format("yardstick", *yardstick()))
        if not names:
            print("{:32} {:6.2f} µs encode, {:.2f} µs decode".format("payload of 100 puts", *codec(bench)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(map(repr, CASES)))
    arguments = parser.parse_args()
    uvloop.run(main(arguments.cases, profiled=arguments.profile))
