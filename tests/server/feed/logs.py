"""Partitions' logs in memory, as feeds read them. Tests write, roll and trim them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.errors import BookieError, NoSuchEntry, NoSuchLedger
from kvstore.partition.state import move_records
from kvstore.partition.state.draft import Draft
from kvstore.partition.state.entry import CREATE, DELETE, EXPIRES, NOTE, OVERWRITE, REPLACES, Entry, EntryKind, control
from kvstore.partition.state.intents import IntentEffect, IntentRecord
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.move_records import MoveRecord, Own
from kvstore.ring.hashing import MURMUR3
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.ledger_list import BEGINNING, LedgerList, Listed, LogEnd
from kvstore.wal.ports import LogEntry
from kvstore.wal.seek import SeekResult


class MemoryLog:
    """One partition's log. Each write is an entry."""

    def __init__(self, partition: str) -> None:
        self.partition = PartitionId(partition)
        self.entries: list[LogEntry] = []
        self.seq, self.time_ms = 0, 1_000
        self.ledgers: list[Listed] = []
        self.trimmed_seq = 0
        self.shown: int | None = None
        """Number of entries that can be read so far; None: all."""
        self.failure: Exception | None = None
        self.lost: set[Position] = set()
        """Positions of entries that are marked as lost."""
        self.news = asyncio.Event()
        self._created: dict[bytes, int] = {}
        self._expiries: dict[bytes, int] = {}
        self.roll()

    def roll(self) -> None:
        """Start another ledger."""
        self._ledger, self._entry = self.ledgers[-1].id + 1 if self.ledgers else 1, -1
        self.ledgers.append(Listed(LedgerId(self._ledger), Seq(self.seq + 1), True, 1, 0))

    def trim(self, ledgers: int) -> None:
        """Delete the first ledgers."""
        self._first = ledgers
        gone = {each.id for each in self.ledgers[:ledgers]}
        self.end = next(each.position for each in reversed(self.entries) if each.position.ledger in gone)
        self.entries = [each for each in self.entries if each.position.ledger not in gone]
        self.ledgers = self.ledgers[ledgers:]
        self.trimmed_seq = self.ledgers[0].first_seq

    @property
    def listed(self) -> LedgerList:
        end = LogEnd(*self.end) if self.trimmed_seq else None
        return LedgerList(1, tuple(self.ledgers), Seq(self.trimmed_seq), end)

    def put(self, *items: tuple[bytes, bytes], expires_ms: int = 0) -> int:
        """Append one entry; return the last version in it."""
        entry = Entry(self.partition, 1, self.seq + 1, self.time_ms, b"")
        kinds = bytearray()
        for key, value in items:
            self.seq += 1
            is_new = key not in self._created
            kind = CREATE if is_new else OVERWRITE
            if not is_new:
                entry.ages.append(self.seq - self._created[key])
            if expires_ms:
                kind |= EXPIRES
                entry.expires_ms.append(expires_ms)
                self._expiries[key] = expires_ms
            self._created.setdefault(key, self.seq)
            kinds.append(kind)
            entry.keys.append(key)
            entry.values.append(value)
        entry.kinds = bytes(kinds)
        self._append(entry)
        return self.seq

    def delete(self, key: bytes) -> int:
        self.seq += 1
        expired = self._expiries.pop(key, 0)
        entry = Entry(self.partition, 1, self.seq, self.time_ms, bytes((DELETE | (REPLACES if expired else 0),)))
        entry.keys = [key]
        entry.replaced_ms = [expired] if expired else []
        del self._created[key]
        self._append(entry)
        return self.seq

    def note(self) -> None:
        self.seq += 1
        entry = Entry(self.partition, 1, self.seq, self.time_ms, bytes((NOTE,)))
        entry.keys = [b"n"]
        self._append(entry)

    def draft(self) -> Draft:
        """Return the next entry, empty."""
        return Draft(self.seq + 1, self.time_ms, MURMUR3)

    def write(self, draft: Draft) -> Position:
        """Append the entry of a draft."""
        self.seq = draft.last_seq
        return self._append(draft.entry(self.partition, 1))

    def commit(self, key: bytes, attempt: Attempt, effect: IntentEffect, keys_of_all: int) -> None:
        """Append an intent on a key, and its commit in another entry."""
        draft = self.draft()
        asked = IntentRecord(attempt, b"home", True, self.time_ms, keys_of_all, int(effect), b"by a transaction")
        intent = draft.intent(key, asked)
        self.write(draft)
        draft = self.draft()
        draft.resolved(intent, is_committed=True)
        self.write(draft)

    def record(self, record: MoveRecord) -> Position:
        """A record of a move."""
        kind = move_records.KIND_OF[type(record)]
        entry = control(self.partition, 1, self.seq + 1, self.time_ms, kind, move_records.encode(record))
        self.seq += len(entry.keys)
        if isinstance(record, Own):
            self.seq = max(self.seq, record.seq)
        return self._append(entry)

    def empty(self) -> None:
        self._append(control(self.partition, 1, self.seq + 1, self.time_ms, EntryKind.EMPTY))

    def _append(self, entry: Entry) -> Position:
        self._entry += 1
        position = Position(LedgerId(self._ledger), EntryId(self._entry))
        self.entries.append(LogEntry(position, entry.encode()))
        self.tell()
        return position

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def readable(self) -> list[LogEntry]:
        if self.failure is not None:
            raise self.failure
        return self.entries if self.shown is None else self.entries[: self.shown]


class MemoryLogs:
    """Stands in for kvstore.wal.log.PartitionLogs."""

    def __init__(self, *partitions: str) -> None:
        self.logs = {PartitionId(each): MemoryLog(each) for each in partitions}
        self.seeker = MemorySeeker(self.logs)
        self.readers = 0
        self.batches: list[int] = []
        """Bytes of each read."""

    def __getitem__(self, partition: str) -> MemoryLog:
        return self.logs[PartitionId(partition)]

    def reader(self, partition: PartitionId, after: Position | None, *, batch_bytes: int = 4 << 20) -> MemoryReader:
        self.readers += 1
        return MemoryReader(self, self.logs[partition], after or BEGINNING, batch_bytes)


class MemorySeeker:
    def __init__(self, logs: dict[PartitionId, MemoryLog]) -> None:
        self._logs = logs
        self.searches = 0

    async def end(self, partition: PartitionId, *, for_good: bool = False) -> SeekResult:
        return self._last(partition, lambda _: True)

    async def last(self, partition: PartitionId, is_before: Callable[[bytes], bool]) -> SeekResult:
        self.searches += 1
        return self._last(partition, is_before)

    def _last(self, partition: PartitionId, is_before: Callable[[bytes], bool]) -> SeekResult:
        log = self._logs[partition]
        for entry in reversed(log.readable()):
            if is_before(entry.payload):
                return SeekResult(entry.position, entry.payload, log.listed)
        first = Position(log.ledgers[0].id, EntryId(-1)) if log.ledgers else BEGINNING
        return SeekResult(first, None, log.listed)


class MemoryReader:
    """Stands in for a TailReader."""

    def __init__(self, logs: MemoryLogs, log: MemoryLog, after: Position, batch_bytes: int) -> None:
        self._logs, self._log, self._after, self._batch_bytes = logs, log, after, batch_bytes

    async def read(self, wait_ms: int, taker: object = None) -> Sequence[LogEntry]:
        while not (found := self._some()):
            await self._log.news.wait()
        self._after = found[-1].position
        self._logs.batches.append(sum(len(each.payload) for each in found))
        return found

    def _some(self) -> list[LogEntry]:
        log = self._log
        listed = [each.id for each in log.ledgers]
        if self._after != BEGINNING and log.trimmed_seq and self._after < log.end and self._after.ledger not in listed:
            raise NoSuchLedger("trimmed")
        found: list[LogEntry] = []
        for entry in log.readable():
            if entry.position > self._after:
                if entry.position in log.lost:
                    if not found:
                        raise NoSuchEntry("marked as lost")
                    break
                found.append(entry)
                if sum(len(each.payload) for each in found) >= self._batch_bytes:
                    break
        return found

    async def close(self) -> None:
        return


def cannot_be_read() -> BookieError:
    return BookieError("no bookie answers")
