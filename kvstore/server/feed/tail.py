"""The newest entries of one partition's log on this server, read once for all watches, and one reader's position in
them.

While a partition is watched, its log is tailed here, from the node's own bookie if it has one, and new entries are kept
for a while in the window. A reader near the end takes entries from the window. A reader further behind reads the log
itself, so that it delays no other reader and nothing is kept for it.

Invariants: no entry at or before a cursor's `position` has a change of interest after the cursor's `seq`, and both
advance together, over an entry that was taken or over entries without interest. An untouched cursor counts as being at
the tail's end; a touched cursor is at most right before the first entry of interest. A page contains all changes of
interest after `after` up to its `next` and none beyond, so its cursor serves any reader that continues from `next`. An
entry that was only partly wanted is not taken and is examined again (pages.py).
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.env.nursery import shielded
from kvstore.errors import (
    Corrupted,
    LedgerError,
    MetadataError,
    NoSuchEntry,
    NoSuchLedger,
    PositionTrimmed,
    StoreError,
    Unavailable,
)
from kvstore.partition.state.changes import FeedEntry, Interest, feed_entry_of
from kvstore.types import NO_ENTRY, PartitionId, Position, Seq
from kvstore.wal.ledger_list import BEGINNING
from kvstore.wal.log import PartitionLogs
from kvstore.wal.ports import LogEntry
from kvstore.wal.seek import SeekResult
from kvstore.wal.tailing.tail import TailReader

log = logging.getLogger(__name__)

WINDOW_BYTES = 2 << 20
WINDOW_ENTRIES = 4_096
"""Limits of the newest entries kept per watched partition."""
BATCH_BYTES = 256 << 10
"""Bytes that a reader behind the window holds in memory, plus one entry."""
POLL_MS = 2_000
FETCH_MS = 500
"""Timeout of a read behind the window. The entries exist, so it takes as long as bookies need to report their last
confirmed entry."""
RETRY_S = 0.1
PATIENCE_S = 10.0


def end_of(found: SeekResult) -> tuple[Position, Seq, int]:
    """Return the position, the sequence and the record time of a place in a log. Raises Corrupted."""
    if found.payload is None:
        return found.position, Seq(max(0, found.listed.trimmed_seq - 1)), 0
    last = feed_entry_of(LogEntry(found.position, found.payload))
    return last.position, last.after, last.time_ms


# docs/protocol.md F7
class LiveTail:
    """Reads new entries of one partition's log into a window. Its owner must keep `run` running."""

    def __init__(self, partition: PartitionId, logs: PartitionLogs) -> None:
        self.partition = partition
        self.window: deque[FeedEntry] = deque()
        self.floor, self.end = BEGINNING, BEGINNING
        """The entries after `floor` up to `end` are in the window."""
        self.seq = self.floor_seq = Seq(0)
        """The sequences after the entries at `end` and at `floor`."""
        self.time_ms = 0
        self.entries = 0
        self.failure: StoreError | None = None
        """The reason why no entries can be read at the moment, or None."""
        self.failing_since = 0.0
        self.joining = 0
        """Number of readers that are looking up their position."""
        self._logs = logs
        self._bytes = 0
        self._keyed: dict[bytes, dict[FeedCursor, None]] = {}
        self._ranged: dict[FeedCursor, None] = {}
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_open(self) -> None:
        """Wait until the tail knows the end of the log."""
        await shielded(self._opened)

    async def run(self) -> None:
        loop, was_over = asyncio.get_running_loop(), False
        while True:
            try:
                await self._follow()
            except (LedgerError, MetadataError, Corrupted) as error:
                if type(error) is not type(self.failure):
                    log.info("partition=%s feed is waiting: %r", self.partition, error)
                if self.failure is None:
                    self.failing_since = loop.time()
                self.failure = error
            is_over = self.failure is not None and loop.time() > self.failing_since + PATIENCE_S
            if is_over and not was_over:  # readers call `check` then; otherwise there is nothing to do for them
                self._wake_all()
            was_over = is_over
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        if not self._opened.done() or self.failure is None or isinstance(self.failure, (NoSuchLedger, NoSuchEntry)):
            self._begin(*end_of(await self._logs.seeker.end(self.partition)))
        reader = self._logs.reader(self.partition, self.end, batch_bytes=BATCH_BYTES)
        try:
            while True:
                for entry in await reader.read(POLL_MS):
                    self._append(feed_entry_of(entry))
                self.failure = None
        finally:
            await reader.close()

    def _begin(self, position: Position, seq: Seq, time_ms: int) -> None:
        if position < self.end:
            raise Corrupted(f"partition {self.partition}: its log ends at {position} but had reached {self.end}")
        before, before_seq = self.end, self.seq
        self.window.clear()
        self._bytes = 0
        self.floor = self.end = position
        self.floor_seq = self.seq = seq
        self.time_ms = time_ms
        self._wake_all(before, before_seq)
        if not self._opened.done():
            self._opened.set_result(None)

    def _append(self, entry: FeedEntry) -> None:
        before, seq = self.end, self.seq
        self.window.append(entry)
        self._bytes += entry.size
        self.entries += 1
        self.end, self.seq, self.time_ms = entry.position, max(seq, entry.after), entry.time_ms
        while self._bytes > WINDOW_BYTES or len(self.window) > WINDOW_ENTRIES:
            gone = self.window.popleft()
            self._bytes -= gone.size
            self.floor, self.floor_seq = gone.position, max(self.floor_seq, gone.after)
        if entry.handed is not None:
            self._wake_all(before, seq)
            return
        if self._keyed:
            keyed = self._keyed
            for key in entry.keys:
                if key in keyed:
                    for cursor in list(keyed[key]):
                        cursor.touch(before, seq)
        if self._ranged:
            keys = sorted(entry.keys)  # because a thousand ranges are searched for a thousand keys in one turn
            for cursor in self._ranged:
                if cursor.is_untouched and (cursor.interest.meets(keys) or (entry.parts and cursor.interest.is_all)):
                    cursor.touch(before, seq)

    def after(self, position: Position) -> list[FeedEntry]:
        """Return about BATCH_BYTES of entries from the window that follow `position`, which must be in the window."""
        window = self.window
        if not window or position >= self.end:
            return []
        found: list[FeedEntry] = []
        size = 0
        first = bisect_right(window, position, key=lambda entry: entry.position) if position > self.floor else 0
        for place in range(first, len(window)):
            found.append(window[place])
            size += window[place].size
            if size >= BATCH_BYTES:
                break
        return found

    # ── watchers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_watched(self) -> bool:
        return bool(self._keyed or self._ranged or self.joining)

    def join(self, cursor: FeedCursor) -> None:
        key = cursor.interest.key
        (self._ranged if key is None else self._keyed.setdefault(key, {}))[cursor] = None

    def leave(self, cursor: FeedCursor) -> None:
        key = cursor.interest.key
        if key is None:
            self._ranged.pop(cursor, None)
        elif key in self._keyed:
            self._keyed[key].pop(cursor, None)
            if not self._keyed[key]:
                del self._keyed[key]

    def _wake_all(self, before: Position | None = None, seq: Seq | None = None) -> None:
        for cursor in [*self._ranged, *(each for cursors in self._keyed.values() for each in cursors)]:
            cursor.touch(self.end if before is None else before, self.seq if seq is None else seq)


class FeedCursor:
    """One reader's position in the feed of one partition. It holds at most one batch of entries, and only while it
    is behind the window."""

    def __init__(
        self,
        tail: LiveTail,
        logs: PartitionLogs,
        turns: asyncio.Semaphore,
        interest: Interest,
        wake: Callable[[], None],
        position: Position,
        seq: Seq,
        *,
        with_handovers: bool,
    ) -> None:
        self.partition = tail.partition
        self.interest = interest
        self.position = position
        """Position of the last entry that was taken."""
        self.seq = seq
        """The reader has every change up to this sequence."""
        self.log_reads = 0
        self._tail, self._logs, self._turns, self._wake = tail, logs, turns, wake
        self._touched = None if position == tail.end else (position, seq)
        """Nothing of interest lies before this position; None: nor after it, up to the tail's end."""
        self._ahead: deque[FeedEntry] = deque()
        self._reader: TailReader | None = None
        self._has_jumped = False
        """True if the log reader is at another position."""
        self._with_handovers = with_handovers
        """True if the reader also needs records that have no sequence of their own."""
        tail.join(self)

    @property
    def is_untouched(self) -> bool:
        return self._touched is None

    @property
    def is_idle(self) -> bool:
        """True if there is no entry to take and no failure for `check` to report."""
        return self._touched is None and self._tail.failure is None

    def touch(self, position: Position, seq: Seq) -> None:
        """Record that an entry of interest follows right after this position."""
        if self._touched is None:
            self._touched = (position, seq)
        self._wake()

    @property
    def is_behind(self) -> bool:
        """True if the next entries must be read from the log (`fetch`)."""
        self._skip()
        return not self._ahead and self.position < self._tail.floor

    @property
    def latest(self) -> Seq:
        """The latest sequence of the log that this server knows."""
        return max(self._tail.seq, self.seq)

    @property
    def is_at_end(self) -> bool:
        """True if this server knows of no entry after the cursor."""
        self._skip()
        return self.position >= self._tail.end and not self._ahead

    def check(self) -> None:
        """Raise Unavailable if new entries have been unreadable here for a while; another server may read them."""
        failure = self._tail.failure
        if failure is not None and asyncio.get_running_loop().time() > self._tail.failing_since + PATIENCE_S:
            raise Unavailable(f"partition {self.partition}: this server cannot read its log: {failure}")

    def ready(self) -> Sequence[FeedEntry]:
        """Return the next entries that are available without waiting. The caller may take them one by one."""
        self._skip()
        if self._ahead:
            return list(self._ahead)
        if self.position < self._tail.floor:
            return []
        return self._tail.after(self.position)

    def take(self, entry: FeedEntry) -> None:
        """Advance past the next entry, which the reader has handled."""
        if self._ahead:
            self._ahead.popleft()
        self.position = entry.position
        self.seq = max(self.seq, entry.after)
        if self.position >= self._tail.end:
            self._touched = None

    def _skip(self) -> None:
        """Skip entries of no interest."""
        position, seq = self._touched or (self._tail.end, self._tail.seq)
        if position > self.position:
            self._ahead.clear()
            self._has_jumped = True
            self.position, self.seq = position, max(self.seq, seq)
        if self.position >= self._tail.end and not self._ahead:
            self._touched = None  # also after a failure of the tail, because nothing else would touch it again

    async def fetch(self) -> None:
        """Read the next entries from the log unless the window has them. Raises PositionTrimmed, Unavailable."""
        if not self.is_behind:
            return
        async with self._turns:
            self.log_reads += 1
            try:
                if self._reader is None or self._has_jumped:
                    await self._stop_reading()
                    self._has_jumped = False
                    self._reader = self._logs.reader(self.partition, self.position, batch_bytes=BATCH_BYTES)
                found = await self._reader.read(FETCH_MS)
                self._ahead.extend(feed_entry_of(entry) for entry in found)
            except NoSuchLedger:
                await self._stop_reading()
                await self._pass_over_trimmed()
            except NoSuchEntry:
                await self._stop_reading()
                raise await self._after_loss() from None
            except (LedgerError, MetadataError, Corrupted) as error:
                await self._stop_reading()
                raise Unavailable(f"partition {self.partition}: its log cannot be read now: {error}") from error
        if self._ahead and self._ahead[-1].position >= self._tail.floor:
            await self._stop_reading()  # the window has the following entries

    async def _pass_over_trimmed(self) -> None:
        """Continue at the new beginning of a log that was trimmed. Raises PositionTrimmed unless the reader already
        has every change before it."""
        try:
            found = await self._logs.seeker.end(self.partition)
        except StoreError as error:
            raise Unavailable(f"partition {self.partition}: its log is being trimmed: {error}") from error
        oldest, end = oldest_of(found, with_handovers=self._with_handovers), found.listed.trimmed_end
        has_all = self.seq >= oldest or (end is not None and self.position >= Position(end.ledger, end.entry))
        if not has_all or not found.listed.ledgers:
            raise PositionTrimmed(self.partition, self.seq, oldest)
        self.position = Position(found.listed.ledgers[0].id, NO_ENTRY)

    # docs/protocol.md A14
    async def _after_loss(self) -> StoreError:
        """Return the error of a reader whose next entry is marked as lost. The lost entries may reach up to the end
        of the log, so the end is the oldest position that can be read from."""
        try:
            _, seq, _ = end_of(await self._logs.seeker.end(self.partition))
        except StoreError as error:
            return Unavailable(f"partition {self.partition}: its log cannot be read now: {error}")
        return PositionTrimmed(self.partition, self.seq, seq)

    async def _stop_reading(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def close(self) -> None:
        self._tail.leave(self)
        self._ahead.clear()
        await self._stop_reading()


# docs/protocol.md F6
def oldest_of(found: SeekResult, *, with_handovers: bool = False) -> int:
    """Return the lowest sequence after which no change was trimmed, or −1 if the log was removed. With
    `with_handovers`, no record right behind that sequence was trimmed either."""
    if not found.listed.ledgers:
        return -1
    oldest = max(0, found.listed.trimmed_seq - 1)
    return oldest + 1 if with_handovers and oldest else oldest
