"""Load during a drill, with a record of the requests, the answers, and the times at which each partition acknowledged
writes.

Two kinds of callers. Those of registers share a few keys, and everything they see goes into a history that two checkers
of linearizability judge. Those of unique keys write each key once: what was acknowledged must be there at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import bisect_left
from random import Random

from kvstore.client import AsyncClient
from kvstore.errors import StoreError
from loadtest.drills.registers import Outcome, Registers, differing

REGISTERS = 3
"""Number of shared keys of each partition."""
CALLERS = 5
"""Number of callers of each register. The search of the checker copes with no more."""
WRITERS = 3
"""Number of writers of unique keys, for each partition."""
PAUSE_S = 0.02
"""Pause between two operations of a caller of a register, in seconds."""
WRITER_PAUSE_S = 0.004


class Load:
    """The load. It runs from `start` to `stop`; then `verify` returns what is missing."""

    def __init__(self, client: AsyncClient, seed: int = 1, *, rests: float = 1.0) -> None:
        """`rests`: factor of the usual pauses of callers."""
        self.client, self._pauses = client, rests
        self._registers = Registers(client)
        self.history, self.errors = self._registers.history, self._registers.errors
        self.acknowledged: dict[str, list[float]] = {}
        """Partition → when it acknowledged a write, in order."""
        self.read: dict[str, list[float]] = {}
        """Partition → when it answered a linearizable read, in order."""
        self._random = Random(seed)
        self._run = b"%x" % time.time_ns()
        """Part of every key, so that keys of an earlier load on the same cluster do not count for this load."""
        self._tags = self._find_tags()
        self._written: list[bytes] = []
        """Unique keys that were acknowledged. The value of each key is the key."""
        self._values = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def partitions(self) -> list[str]:
        return sorted(self._tags)

    def start(self) -> None:
        for partition, tag in sorted(self._tags.items()):
            self.acknowledged[partition], self.read[partition] = [], []
            for key, caller in itertools.product(self._register_keys(tag), range(CALLERS)):
                work = self._call_register(partition, key, f"{key.decode()}/{caller}")
                self._tasks.append(asyncio.create_task(work))
            for writer in range(WRITERS):
                self._tasks.append(asyncio.create_task(self._write_unique(partition, tag, writer)))

    async def stop(self) -> None:
        """Stop, wait for the operations in flight, and read every register again."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        for key in self.register_keys():
            await self._registers.get(key, f"last/{next(self._incarnations)}")
        self.history.close()

    async def verify(self) -> list[bytes]:
        """Return the acknowledged unique keys that are missing or have another value than was written."""
        return await differing(self.client, {key: key for key in self._written})

    def register_keys(self) -> list[bytes]:
        """Return the shared keys of all partitions."""
        return [key for _, tag in sorted(self._tags.items()) for key in self._register_keys(tag)]

    def _register_keys(self, tag: bytes) -> list[bytes]:
        return [b"{%b}register-%b-%d" % (tag, self._run, number) for number in range(REGISTERS)]

    @property
    def tags(self) -> list[bytes]:
        """Return one hash tag for each partition. Keys with that tag in braces belong to it."""
        return [tag for _, tag in sorted(self._tags.items())]

    @property
    def unique(self) -> int:
        return len(self._written)

    def longest_gap(self, partition: str, since: float, until: float) -> tuple[float, float]:
        """Return the longest time without an acknowledged write within a window, in seconds, and when it began."""
        return longest_gap(self.acknowledged[partition], since, until)

    def count(self, partition: str, since: float, until: float) -> int:
        """Return the number of writes acknowledged within a window."""
        times = self.acknowledged[partition]
        return bisect_left(times, until) - bisect_left(times, since)

    def _find_tags(self) -> dict[str, bytes]:
        tags: dict[str, bytes] = {}
        for number in range(10_000):
            tag = b"d%d" % number
            tags.setdefault(self.client.cluster.partition_of(b"{%b}" % tag), tag)
        return tags

    # ── callers ──

    async def _write_unique(self, partition: str, tag: bytes, writer: int) -> None:
        for number in itertools.count():
            if self._stopping:
                return
            key = b"{%b}unique-%b-%d-%d" % (tag, self._run, writer, number)
            try:
                await self.client.put(key, key)
            except StoreError as error:
                self._registers.failed(error)
            else:
                self._written.append(key)
                self.acknowledged[partition].append(time.perf_counter())
            await asyncio.sleep(WRITER_PAUSE_S * self._pauses)

    async def _call_register(self, partition: str, key: bytes, name: str) -> None:
        process = name
        while not self._stopping:
            choice, value = self._random.random(), b"%d" % next(self._values)
            if choice < 0.5:
                times, work = self.read[partition], self._registers.get(key, process)
            elif choice < 0.8:
                times, work = self.acknowledged[partition], self._registers.put(key, process, value)
            else:
                times, work = self.acknowledged[partition], self._registers.compare_and_set(key, process, value)
            outcome = await work
            if outcome is Outcome.DONE:
                times.append(time.perf_counter())
            elif outcome is Outcome.UNKNOWN:
                process = f"{name}#{next(self._incarnations)}"
            await asyncio.sleep(PAUSE_S * self._pauses * self._random.random() * 2)


def longest_gap(times: list[float], since: float, until: float) -> tuple[float, float]:
    """Return the longest time without any of the ascending `times` within a window, in seconds, and when it began."""
    inside = times[bisect_left(times, since) : bisect_left(times, until)]
    edges = [since, *inside, until]
    return max((later - earlier, earlier) for earlier, later in itertools.pairwise(edges))
