"""The change feeds on this server: tails shared by those who watch, places in logs, the newest ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from kvstore.env import Clock, Env, Task
from kvstore.env.nursery import TaskNursery
from kvstore.errors import Corrupted, InvalidRequest, LedgerError, Overloaded, PositionTrimmed, StoreError, Unavailable
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore
from kvstore.partition.state.changes import Interest, first_seq_of, time_of
from kvstore.ring import Ring, codec
from kvstore.server.feed.tail import FeedCursor, FeedLogs, LiveTail, end_of, oldest_of
from kvstore.server.placement.retirement import partitions_kept
from kvstore.types import EntryId, PartitionId, Position, Seq
from kvstore.wal.seek import SeekResult

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCHES_MAX = 1_000
"""Watches at a time; more are refused."""
LOG_READS_MAX = 8
"""Readers of logs, behind the windows, that read at a time. The others wait their turn."""
LINGER_S = 10.0
"""How long a tail goes on when nobody watches any more."""
OPEN_S = 2.0
"""How long a reader waits for a tail to open. Clients leave a server that has said nothing for 2.5 s, by default: by
then it has said which log cannot be read. The tail goes on meanwhile, for who comes again."""
FOLLOWS_MAX = 8
"""Places of one watch that are looked for at a time: each takes several reads, one after another."""


class Feeds:
    """`close` ends what it has started."""

    def __init__(
        self,
        env: Env,
        store: MetadataStore,
        logs: FeedLogs,
        known_ring: Callable[[], Ring],
        latest: Callable[[PartitionId], Awaitable[int]],
        cluster: str = "",
    ) -> None:
        self.ring = known_ring
        """The newest that this server has read."""
        self.latest = latest
        """How far a partition of the ring has come, as its leader says."""
        self.watches_total = 0
        self.changes_total = 0
        self.pages_total = 0
        self.slow_total = 0
        self.log_reads = 0
        self._env, self._store, self._logs = env, store, logs
        self._nursery = env.nursery.child("feeds")
        self._turns = asyncio.Semaphore(LOG_READS_MAX)
        self._ring_version = 0
        self._cluster = cluster
        self._woken_by_ring: dict[Callable[[], None], None] = {}
        self._tails: dict[PartitionId, tuple[LiveTail, Task]] = {}
        self._idle: dict[PartitionId, asyncio.TimerHandle] = {}

    async def close(self) -> None:
        for timer in self._idle.values():
            timer.cancel()
        await self._nursery.close()

    def statistics(self) -> dict[str, int]:
        return {
            "watches": self.watches,
            "watches_total": self.watches_total,
            "feed_tails": len(self._tails),
            "feed_changes_total": self.changes_total,
            "feed_pages_total": self.pages_total,
            "feed_log_reads_total": self.log_reads,
            "watches_too_slow_total": self.slow_total,
        }

    def look_at_ring(self) -> None:
        """The topology has changed. Partitions that have joined or left are followed or let go at once."""
        version = self.ring().version
        if version != self._ring_version:
            self._ring_version = version
            for wake in self._woken_by_ring:
                wake()

    def admit(self, wake: Callable[[], None]) -> None:
        """Count a watch in; `wake` is called when the ring has changed. Raises Overloaded."""
        if self.watches >= WATCHES_MAX:
            raise Overloaded(f"{self.watches} watches are open at this server, at most {WATCHES_MAX}")
        self._woken_by_ring[wake] = None
        self.watches_total += 1

    def leave(self, wake: Callable[[], None]) -> None:
        self._woken_by_ring.pop(wake, None)

    @property
    def watches(self) -> int:
        return len(self._woken_by_ring)

    async def newest_ring(self) -> Ring:
        """As it is in the metadata store now. Raises MetadataError."""
        await self._store.sync(paths.RING)
        data, _ = await self._store.get(paths.RING)
        ring = codec.decode(data)
        known = self.ring()
        return known if known.version > ring.version else ring

    async def left(self, ring: Ring) -> list[PartitionId]:
        """Partitions that have left this ring and whose logs are still kept. Raises MetadataError."""
        return [each for each in await partitions_kept(self._store) if each not in ring.partitions]

    async def cluster(self) -> str:
        """The cluster's identity. Raises MetadataError, ConfigError."""
        self._cluster = self._cluster or await LayoutStore(self._store).instance_id()
        return self._cluster

    @property
    def clock(self) -> Clock:
        return self._env.clock

    # ── tails and cursors ─────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _joining(self, partition: PartitionId) -> AsyncIterator[LiveTail]:
        """The partition's tail, once it knows where the log ends; it goes on meanwhile. Raises Unavailable."""
        found = self._tails.get(partition)
        if found is None:
            tail = LiveTail(partition, self._logs)
            found = self._tails[partition] = (tail, self._nursery.spawn(tail.run(), name=f"feed of {partition}"))
        tail = found[0]
        tail.joining += 1
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    await tail.wait_open()
            except TimeoutError:
                raise Unavailable(f"partition {partition}: its log cannot be read now: {tail.failure}") from None
            yield tail
        finally:
            tail.joining -= 1
            self._linger(partition)

    def known_tail(self, partition: PartitionId) -> LiveTail | None:
        found = self._tails.get(partition)
        return found[0] if found is not None else None

    async def cursor(
        self, partition: PartitionId, after: int | None, interest: Interest, wake: Callable[[], None]
    ) -> FeedCursor:
        """A reader behind `after`, or behind the end as it is now. Raises PositionTrimmed, InvalidRequest if the log
        has not come so far, Unavailable, MetadataError."""
        async with self._joining(partition) as tail:
            if after is not None and after > tail.seq:
                await self._check_reached(partition, after)
            if after is None:
                position, seq = tail.end, tail.seq
            elif after > tail.floor_seq:
                position, seq = _in_window(tail, after), Seq(after)
            else:
                position, seq = await self._behind(partition, after), Seq(after)
            return FeedCursor(tail, self._logs, self._turns, interest, wake, position, seq)

    async def _check_reached(self, partition: PartitionId, after: int) -> None:
        """Check that the log has come to the reader's position. Another server may have shown it before this one knows
        of it, but a reader ahead of the log would miss everything up to there."""
        if (await self.newest_ring()).has_left(partition):
            found = await self._found_end(partition)
            if oldest_of(found) < 0:
                raise PositionTrimmed(partition, after, oldest_of(found))
            latest = int(end_of(found)[1])
        else:
            latest = await self.latest(partition)
        if after > latest:
            raise InvalidRequest(
                f"partition {partition}: want a position up to {latest}, where its log ends, got {after}: it is one of "
                "another cluster"
            )

    async def _behind(self, partition: PartitionId, after: int) -> Position:
        """Right before the last entry that begins at `after` or before: it may go on behind."""
        found = await self._search(partition, lambda payload: first_seq_of(payload) <= after)
        oldest = oldest_of(found)
        if not found.listed.ledgers and not after and await self._never_logged(partition):
            return found.position
        if after < oldest or oldest < 0:
            raise PositionTrimmed(partition, after, oldest)
        ledger, entry = found.position
        return found.position if found.payload is None else Position(ledger, EntryId(entry - 1))

    async def cursor_at(
        self, partition: PartitionId, time_ms: int, interest: Interest, wake: Callable[[], None]
    ) -> FeedCursor:
        """A reader of all that was logged at a record time or later. Raises PositionTrimmed if that may not be all
        there is."""
        async with self._joining(partition) as tail:
            found = await self._search(partition, lambda payload: time_of(payload) < time_ms)
            if found.payload is None and oldest_of(found) != 0:
                raise PositionTrimmed(partition, 0, oldest_of(found))
            position, seq, _ = end_of(found)
            return FeedCursor(tail, self._logs, self._turns, interest, wake, position, seq)

    async def _search(self, partition: PartitionId, is_before: Callable[[bytes], bool]) -> SeekResult:
        try:
            return await self._logs.seeker.last(partition, is_before)
        except (LedgerError, Corrupted) as error:
            raise Unavailable(f"partition {partition}: its log cannot be read now: {error}") from error

    async def end(self, partition: PartitionId) -> tuple[Position, Seq, int]:
        """Where the log ends, and the least sequence that can be read behind. Raises Unavailable, MetadataError."""
        found = await self._found_end(partition)
        position, seq, _ = end_of(found)
        return position, seq, max(0, oldest_of(found))

    async def ends(self, partition: PartitionId) -> tuple[int, Seq] | None:
        """The least sequence that a partition that has left can be read behind, and its last one; None if its log is
        gone. Raises Unavailable, MetadataError."""
        found = await self._found_end(partition)
        if found.listed.ledgers:
            return oldest_of(found), end_of(found)[1]
        return (0, Seq(0)) if await self._never_logged(partition) else None

    async def _never_logged(self, partition: PartitionId) -> bool:
        """Of a partition of which no log was found: that it never had one. Else it was removed, and that comes after
        the ring has forgotten the partition (retirement.py)."""
        if partition in await partitions_kept(self._store):
            return True
        return partition in (await self.newest_ring()).partitions

    async def _found_end(self, partition: PartitionId) -> SeekResult:
        try:
            return await self._logs.seeker.end(partition, for_good=True)
        except (LedgerError, Corrupted) as error:
            raise Unavailable(f"partition {partition}: its log cannot be read now: {error}") from error

    async def drop(self, cursor: FeedCursor) -> None:
        """The reader has left."""
        self.log_reads += cursor.log_reads
        await cursor.close()
        self._linger(cursor.partition)

    def _linger(self, partition: PartitionId) -> None:
        """Look later whether anybody still watches."""
        timer = self._idle.pop(partition, None)
        if timer is not None:
            timer.cancel()
        self._idle[partition] = asyncio.get_running_loop().call_later(LINGER_S, self._end_if_idle, partition)

    def _end_if_idle(self, partition: PartitionId) -> None:
        self._idle.pop(partition, None)
        found = self._tails.get(partition)  # None: it has ended while its last reader was leaving
        if found is not None and not found[0].is_watched:
            del self._tails[partition]
            found[1].cancel()


async def in_each(wanted: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do the work for all of them, FOLLOWS_MAX at a time. Raises the error of the first in which it failed, of
    those that had begun by then."""
    places = iter(range(len(wanted)))
    failures: dict[int, StoreError] = {}

    async def some() -> None:
        for place in places:
            if failures:
                return
            try:
                await work(wanted[place])
            except StoreError as error:
                failures[place] = error

    mine = TaskNursery("follow")  # nothing of it goes on when the caller has left
    tasks = [mine.spawn(some(), name="some") for _ in range(min(FOLLOWS_MAX, len(wanted)))]
    try:
        for task in tasks:
            await task
    finally:
        await mine.close()
    if failures:
        raise failures[min(failures)]


def _in_window(tail: LiveTail, after: int) -> Position:
    """The last entry that a reader who stands at `after`, in the window, does not have to see."""
    position = tail.floor
    for entry in tail.window:
        if entry.is_behind(after):
            break
        position = entry.position
    return position
