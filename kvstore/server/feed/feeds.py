"""The change feeds on this server: the tails that watches share, lookups of positions in logs, and the latest ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from kvstore.env import Clock, Env, Task
from kvstore.env.nursery import TaskNursery
from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import Corrupted, InvalidRequest, LedgerError, PositionTrimmed, StoreError, Unavailable
from kvstore.meta import paths
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore
from kvstore.partition.state.changes import Interest, first_seq_of, time_of
from kvstore.ring import Ring, codec
from kvstore.server.feed.tail import FeedCursor, LiveTail, end_of, oldest_of
from kvstore.server.placement.retirement import partitions_kept
from kvstore.types import EntryId, PartitionId, Position, Seq
from kvstore.wal.log import PartitionLogs
from kvstore.wal.seek import SeekResult

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCHES_MAX = 1_000
"""Maximum number of concurrent watches. A further watch displaces the oldest one of the user or network with the most
watches, or is refused if no other has more than its own."""
LOG_READS_MAX = 8
"""Maximum number of concurrent readers of logs beyond the windows. Further readers wait."""
LINGER_S = 10.0
"""Time for which a tail continues without watches."""
OPEN_S = 2.0
"""Time that a reader waits for a tail to open. By default clients leave a server that has sent nothing for 2.5 s, so by
then the server reports which log cannot be read. The tail keeps opening meanwhile, for clients that come back."""
FOLLOWS_MAX = 8
"""Maximum number of positions that one watch looks up at once. Each takes several sequential reads."""


class Feeds:
    """The feeds of one server. `close` ends everything that they have started."""

    def __init__(
        self,
        env: Env,
        store: MetadataStore,
        logs: PartitionLogs,
        known_ring: Callable[[], Ring],
        latest: Callable[[PartitionId], Awaitable[int]],
        cluster: str = "",
    ) -> None:
        self.ring = known_ring
        """Returns the latest ring that this server has read."""
        self.latest = latest
        """Returns the latest sequence of a partition of the ring, according to its leader."""
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
        self.slots = SharedSlots(WATCHES_MAX, "watches")
        self._wakes: dict[Callable[[], None], None] = {}
        """The functions that wake the watches."""
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

    def read_ring(self) -> None:
        """Notify the watches that the topology has changed, so that they follow new partitions and leave removed
        ones at once."""
        version = self.ring().version
        if version != self._ring_version:
            self._ring_version = version
            for wake in self._wakes:
                wake()

    @asynccontextmanager
    async def place(self, wake: Callable[[], None], owner: str) -> AsyncIterator[None]:
        """Hold a slot for a watch while the context is open. `wake` is called when the ring has changed. `owner` and
        the errors are those of SharedSlots.place."""
        async with self.slots.place(owner):
            self.watches_total += 1
            self._wakes[wake] = None
            try:
                yield
            finally:
                del self._wakes[wake]

    @property
    def watches(self) -> int:
        return len(self.slots)

    async def newest_ring(self) -> Ring:
        """Read the current ring from the metadata store. Raises MetadataError."""
        await self._store.sync(paths.RING)
        data, _ = await self._store.get(paths.RING)
        ring = codec.decode(data)
        known = self.ring()
        return known if known.version > ring.version else ring

    async def left(self, ring: Ring) -> list[PartitionId]:
        """Return the partitions that are no longer in this ring but whose logs are kept. Raises MetadataError."""
        return [each for each in await partitions_kept(self._store) if each not in ring.partitions]

    async def cluster(self) -> str:
        """Return the id of the cluster. Raises MetadataError, ConfigError."""
        self._cluster = self._cluster or await LayoutStore(self._store).instance_id()
        return self._cluster

    @property
    def clock(self) -> Clock:
        return self._env.clock

    # ── tails and cursors ─────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _joining(self, partition: PartitionId) -> AsyncIterator[LiveTail]:
        """Enter the context with the partition's tail once the tail knows the end of its log, and keep the tail
        running during the context. Raises Unavailable."""
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
        self,
        partition: PartitionId,
        after: int | None,
        interest: Interest,
        wake: Callable[[], None],
        *,
        with_handovers: bool = False,
    ) -> FeedCursor:
        """Return a cursor on the changes after sequence `after`, or after the current end of the log if `after` is
        None. `wake` is called when there are new entries. `with_handovers` is True for a reader that also needs the
        records right behind `after`. Raises PositionTrimmed, Unavailable, MetadataError, and InvalidRequest if the log
        has not reached `after`."""
        async with self._joining(partition) as tail:
            if after is not None and after > tail.seq:
                await self._check_reached(partition, after)
            if after is None:
                position, seq = tail.end, tail.seq
            elif after > tail.floor_seq:
                position, seq = _in_window(tail, after), Seq(after)
            else:
                position, seq = await self._behind(partition, after, with_handovers=with_handovers), Seq(after)
            return FeedCursor(
                tail, self._logs, self._turns, interest, wake, position, seq, with_handovers=with_handovers
            )

    async def _check_reached(self, partition: PartitionId, after: int) -> None:
        """Check that the log has reached the reader's position. Another server may have issued the position before
        this server knows of it. But a reader whose position is beyond the end of the log would miss every change up
        to that position."""
        if (await self.newest_ring()).has_left(partition):
            found = await self._found_end(partition)
            if oldest_of(found) < 0:
                raise PositionTrimmed(partition, after, oldest_of(found))
            latest = int(end_of(found)[1])
        else:
            latest = await self.latest(partition)
        if after > latest:
            raise InvalidRequest(
                f"partition {partition}: expected a position up to {latest}, where its log ends, got {after}, which "
                "belongs to "
                "another cluster"
            )

    # docs/protocol.md F6
    async def _behind(self, partition: PartitionId, after: int, *, with_handovers: bool) -> Position:
        """Return the position right before the last entry that begins at or before `after`, because that entry may
        contain changes after it."""
        found = await self._search(partition, lambda payload: first_seq_of(payload) <= after)
        oldest = oldest_of(found, with_handovers=with_handovers)
        if not found.listed.ledgers and not after and await self._never_logged(partition):
            return found.position
        if after < oldest or oldest < 0:
            raise PositionTrimmed(partition, after, oldest)
        ledger, entry = found.position
        return found.position if found.payload is None else Position(ledger, EntryId(entry - 1))

    async def cursor_at(
        self, partition: PartitionId, time_ms: int, interest: Interest, wake: Callable[[], None]
    ) -> FeedCursor:
        """Return a cursor on all changes logged at the record time `time_ms` or later. Raises PositionTrimmed if
        some of them may have been trimmed."""
        async with self._joining(partition) as tail:
            found = await self._search(partition, lambda payload: time_of(payload) < time_ms)
            if found.payload is None and oldest_of(found) != 0:
                raise PositionTrimmed(partition, 0, oldest_of(found))
            position, seq, _ = end_of(found)
            return FeedCursor(tail, self._logs, self._turns, interest, wake, position, seq, with_handovers=True)

    async def _search(self, partition: PartitionId, is_before: Callable[[bytes], bool]) -> SeekResult:
        try:
            return await self._logs.seeker.last(partition, is_before)
        except (LedgerError, Corrupted) as error:
            raise Unavailable(f"partition {partition}: its log cannot be read now: {error}") from error

    async def end(self, partition: PartitionId) -> tuple[Position, Seq, int]:
        """Return the position and sequence of the end of the log, and the lowest sequence from which the log can
        still be read. Raises Unavailable, MetadataError."""
        found = await self._found_end(partition)
        position, seq, _ = end_of(found)
        return position, seq, max(0, oldest_of(found))

    async def ends(self, partition: PartitionId) -> tuple[int, Seq] | None:
        """Return (lowest readable sequence, last sequence) of a partition that has left the ring, or None if its log
        was removed. Raises Unavailable, MetadataError."""
        found = await self._found_end(partition)
        if found.listed.ledgers:
            return oldest_of(found), end_of(found)[1]
        return (0, Seq(0)) if await self._never_logged(partition) else None

    async def _never_logged(self, partition: PartitionId) -> bool:
        """Return True if a partition without a log never had one. Otherwise its log was removed, which happens only
        after the ring has forgotten the partition (retirement.py)."""
        if partition in await partitions_kept(self._store):
            return True
        return partition in (await self.newest_ring()).partitions

    async def _found_end(self, partition: PartitionId) -> SeekResult:
        try:
            return await self._logs.seeker.end(partition, for_good=True)
        except (LedgerError, Corrupted) as error:
            raise Unavailable(f"partition {partition}: its log cannot be read now: {error}") from error

    async def drop(self, cursor: FeedCursor) -> None:
        """Close a reader."""
        self.log_reads += cursor.log_reads
        await cursor.close()
        self._linger(cursor.partition)

    def _linger(self, partition: PartitionId) -> None:
        """Check later whether the tail still has readers."""
        timer = self._idle.pop(partition, None)
        if timer is not None:
            timer.cancel()
        self._idle[partition] = asyncio.get_running_loop().call_later(LINGER_S, self._end_if_idle, partition)

    def _end_if_idle(self, partition: PartitionId) -> None:
        self._idle.pop(partition, None)
        found = self._tails.get(partition)  # None if it ended while its last reader was leaving
        if found is not None and not found[0].is_watched:
            del self._tails[partition]
            found[1].cancel()


async def in_each(wanted: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do `work` for each item, at most FOLLOWS_MAX at a time. After a failure no further item begins. Raises the
    error of the first item, in their order, that failed."""
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

    mine = TaskNursery("follow")  # no work continues after the caller has left
    tasks = [mine.spawn(some(), name="some") for _ in range(min(FOLLOWS_MAX, len(wanted)))]
    try:
        for task in tasks:
            await task
    finally:
        await mine.close()
    if failures:
        raise failures[min(failures)]


def _in_window(tail: LiveTail, after: int) -> Position:
    """Return the position of the last entry in the window that a reader at `after` does not need."""
    position = tail.floor
    for entry in tail.window:
        if entry.is_behind(after):
            break
        position = entry.position
    return position
