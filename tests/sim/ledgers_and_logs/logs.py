"""Logs on the bench, created in one line each."""

from __future__ import annotations

import asyncio

from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.types import Position, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.leading.leader_log import LeaderLog
from kvstore.wal.log import PartitionLogs
from tests.sim.ledgers_and_logs.bench import Appended, Bench, P, first_seq

SMALL = LogConfig(roll_entries=5, check_every_s=0.1, orphan_age_s=20.0)
NEVER = LogConfig(check_every_s=0.1)
LISTED = paths.partition_log(P)
"""The path of the log's list of ledgers."""


class Writer:
    """Appends numbered entries to an open log."""

    def __init__(self, log: LeaderLog, seq: int = 1) -> None:
        self.log = log
        self.entries = Appended()
        self.seq = seq

    async def append(self, count: int, gap_s: float = 0.01) -> None:
        for _ in range(count):
            self.log.append(b"%d" % self.seq, Seq(self.seq), self.entries.done)
            self.seq += 1
            await asyncio.sleep(gap_s)
        await asyncio.sleep(0.1)


async def opened(logs: PartitionLogs, lease_ms: int = 500) -> LeaderLog:
    return await logs.open_as_leader(P, lease_ms, first_seq)


async def with_older_list(bench: Bench) -> tuple[Writer, bytes]:
    """Return the writer of a log of several ledgers, and its list as it was with one ledger."""
    writer = Writer(await opened(bench.logs(SMALL)))
    await writer.append(3)
    older, _ = await MemoryStore(bench.tree).get(LISTED)
    await writer.append(12)
    return writer, older


async def set_list_back(bench: Bench, older: bytes) -> None:
    """Put an older list in place of the log's list."""
    await MemoryStore(bench.tree).set(LISTED, older, -1)


async def read_all(logs: PartitionLogs, count: int, after: Position | None = None) -> list[bytes]:
    """Return the next `count` payloads of the log."""
    reader = logs.reader(P, after)
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [entry.payload for entry in await reader.read(1000)]
    await reader.close()
    return found


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]
