"""Follows the log of a move's source, on the leader of the target: logs the changes to the range, and counts the copied
records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.errors import Corrupted
from kvstore.partition.leading.leader import Leader
from kvstore.partition.moves import pages
from kvstore.partition.state import entry as entries
from kvstore.partition.state import move_records
from kvstore.partition.state.digest import RangeDigest
from kvstore.partition.state.engine import wait_caught_up
from kvstore.partition.state.entry import EntryKind
from kvstore.partition.state.move_records import ImportRows, LogVersion
from kvstore.partition.state.ownership import ImportedRange
from kvstore.partition.state.state import ReplicaState
from kvstore.types import Position
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.log import PartitionLogs
from kvstore.wal.ports import LogEntry
from kvstore.wal.tailing.tail import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, TailReader

FOLLOW_MS = 100
CLOSE_ENTRIES, CLOSE_BYTES = 16, 256 << 10
"""The target is close if two consecutive reads of the source's log bring less than this; a single read may have reached
a ledger's end. The remainder is one more entry of the target."""
STEADY_READS = 8
"""After this many consecutive reads that brought everything there was, another read brings the target no closer: a
source that is always busy, or writes large values, has more than CLOSE_ENTRIES or CLOSE_BYTES in flight at any moment.
The target then counts as close. If a freeze proves too short, a longer one follows (docs/protocol.md M8)."""
LOG_VERSION = bytes((EntryKind.LOG_VERSION,))
TURN_BYTES = 32 << 10
"""Bytes of the source's log that are processed before the event loop gets another turn: some milliseconds."""


class SourceFollower:
    """Follows the source of one move during one leadership of the target. `lead` returns the leader, and raises if the
    leadership is over."""

    def __init__(self, state: ReplicaState, logs: PartitionLogs, lead: Callable[[], Leader]) -> None:
        self.rows = self.bytes = 0
        """Numbers logged here, for statistics."""
        self.read_to = BEGINNING
        """Position in the source's log. Entries behind IMPORT's tail, up to here, say nothing about the range."""
        self._state, self._logs, self._lead = state, logs, lead
        self._reader: TailReader | None = None
        self._digest: RangeDigest | None = None
        self._steady = 0
        """Number of consecutive reads that brought everything there was."""

    async def count(self, found: ImportedRange) -> RangeDigest:
        """Return the count and hash of the copy. They are kept current from now on."""
        if self._digest is None:
            self._digest = RangeDigest(self._state.engine, found.span)
            self._state.watch(self._digest)
        while not self._digest.step():
            await asyncio.sleep(0)
            self._lead()
        return self._digest

    async def read_on(self, found: ImportedRange) -> bool:
        """Read the source's log once, and log the changes to the range. Returns True if the target is close behind the
        source: the read returned little, or as little as possible. Raises NoSuchLedger if the log has been trimmed,
        NoSuchEntry if the next entry is marked as lost."""
        if self._reader is None:
            self._reader = self._logs.reader(found.source, found.tail)
            self.read_to = found.tail
        read = await self._reader.read(FOLLOW_MS)
        try:
            size = await self._log_all(read, found)
        except BaseException:
            await self.stop_reading()  # read what was not logged again
            raise
        is_all = len(read) < BATCH_ENTRIES_MAX and size < BATCH_BYTES_MAX
        self._steady = self._steady + 1 if is_all else 0
        return self._steady >= STEADY_READS or (len(read) < CLOSE_ENTRIES and size < CLOSE_BYTES)

    async def read_up_to(self, freeze: Position, found: ImportedRange) -> None:
        """Log all changes up to the source's record at `freeze`, which the source reports as acknowledged."""
        if self._reader is not None:
            self._reader.confirm(freeze)
        while self.read_to < freeze:
            await self.read_on(found)
        self._steady = 0

    async def forget(self) -> None:
        """Drop what is known, to begin again or to end."""
        if self._digest is not None:
            self._state.unwatch(self._digest)
            self._digest = None
        await self.stop_reading()

    async def stop_reading(self) -> None:
        reader, self._reader, self.read_to = self._reader, None, BEGINNING
        if reader is not None:
            await reader.close()

    async def _log_all(self, read: Sequence[LogEntry], found: ImportedRange) -> int:
        """Log the changes of several entries. Return the bytes of the entries."""
        size = turn = 0
        changes = pages.RangeChanges(found.span, self._state.hash)
        for logged in read:
            self._take(changes, logged, found)
            size += len(logged.payload)
            if size - turn >= TURN_BYTES:
                turn = size
                await asyncio.sleep(0)
            if changes.size >= pages.PAGE_BYTES:
                await self._log(changes, logged.position, found)
                changes = pages.RangeChanges(found.span, self._state.hash)
        if read and (not changes.is_empty or size > pages.PAGE_BYTES):
            await self._log(changes, read[-1].position, found)
        if read:
            self.read_to = read[-1].position
        return size

    async def _log(self, changes: pages.RangeChanges, tail: Position, found: ImportedRange) -> None:
        await wait_caught_up(self._state.engine)
        rows = ImportRows(found.move, changes.keys, changes.rows, b"", tail)
        await self._lead().append_record(rows, changes.requests)
        self.rows += len(changes.keys)
        self.bytes += changes.size

    def _take(self, changes: pages.RangeChanges, logged: LogEntry, found: ImportedRange) -> None:
        entry = entries.decode(logged.payload)
        if entry.partition != found.source:
            raise Corrupted(f"the log of {found.source} contains entry {logged.position} of {entry.partition}")
        if not entry.is_control:
            changes.add(entry)
        elif entry.kinds == LOG_VERSION:
            record = move_records.decode(EntryKind.LOG_VERSION, entry.control)
            assert isinstance(record, LogVersion)
            pages.admit(self._state, record.version)
