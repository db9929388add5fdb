"""Logs on the bench, in a line each."""

from __future__ import annotations

import asyncio

from kvstore.types import Position, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.leading.leader_log import OpenLog
from kvstore.wal.log import PartitionLogs
from tests.sim.ledgers_and_logs.bench import Appended, P, first_seq

SMALL = LogConfig(roll_entries=5, check_every_s=0.1, orphan_age_s=20.0)
NEVER = LogConfig(check_every_s=0.1)


class Writer:
    """Appends numbered entries to an open log."""

    def __init__(self, log: OpenLog, seq: int = 1) -> None:
        self.log = log
        self.entries = Appended()
        self.seq = seq

    async def append(self, count: int, gap_s: float = 0.01) -> None:
        for _ in range(count):
            self.log.append(b"%d" % self.seq, Seq(self.seq), self.entries.done)
            self.seq += 1
            await asyncio.sleep(gap_s)
        await asyncio.sleep(0.1)


async def opened(logs: PartitionLogs, lease_ms: int = 500) -> OpenLog:
    return await logs.open_as_leader(P, lease_ms, first_seq)


async def read_all(logs: PartitionLogs, count: int, after: Position | None = None) -> list[bytes]:
    """The next `count` payloads of the log."""
    reader = logs.reader(P, after)
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [entry.payload for entry in await reader.read(1000)]
    await reader.close()
    return found


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]
