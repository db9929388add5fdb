"""One watch: merges the changes of a key or a range from the feeds of several partitions into messages.

The sender requests the next message only when the network can accept it. Therefore a slow reader holds one batch of one
partition, and delays no other reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Protocol

from kvstore.env.events import wait_within
from kvstore.errors import MetadataError, Overloaded, Retryable, StoreError, Unavailable
from kvstore.partition.state.changes import DELETED, EXPIRED, FeedEntry, Interest
from kvstore.proto import kv_pb2
from kvstore.server.feed.feeds import Feeds, in_each
from kvstore.server.feed.pages import interest_in
from kvstore.server.feed.tail import FeedCursor
from kvstore.server.feed.watch_plan import FeedToFollow, WatchPlan
from kvstore.types import PartitionId

log = logging.getLogger(__name__)

MESSAGE_BYTES = 256 << 10
"""Approximate maximum bytes of keys and values in one message."""
HEARTBEAT_S = 5.0
HEARTBEAT_MIN_S = 0.05
_DELETES = frozenset((DELETED, EXPIRED))
SLOW_S = 60.0
"""Time after which a client that takes no message is disconnected. It can continue from its position."""
RETRY_S = 0.1
"""Delay in seconds between attempts to read a log that is unreadable at the moment."""


class Writes(Protocol):
    """The stream to the client of a watch."""

    async def write(self, message: kv_pb2.WatchResponse) -> None:
        """Write a message. Return when the network can accept more."""
        ...


async def send_watch(feeds: Feeds, request: kv_pb2.WatchRequest, stream: Writes, owner: str = "") -> None:
    """Send the changes that a request asks for until the client disconnects. `owner` is the user or the network of the
    client. Raises StoreError: PositionTrimmed, InvalidRequest, Unavailable, Overloaded."""
    interest = interest_in(request.start, request.end)
    heartbeat_s = request.heartbeat_ms / 1000 or HEARTBEAT_S
    watch = Watch(feeds, interest, heartbeat_s=heartbeat_s, keys_only=request.keys_only)
    try:
        async with feeds.place(watch.wake, owner):
            async for message in watch.messages(request.after, request.seen):
                async with asyncio.timeout(SLOW_S):
                    await stream.write(message)
    except TimeoutError:
        feeds.slow_total += 1
        raise Overloaded(f"the client has read nothing for {SLOW_S:g} s; continue from its position") from None
    except MetadataError as error:
        # Only logged, because the error names the metadata store's servers and user.
        log.info("a watch ended, because the metadata store failed: %s", error)
        raise Unavailable("the metadata store cannot be read now") from error
    finally:
        await watch.close()


# docs/protocol.md F5
class Watch:
    """One watch. Iterate over `messages`, then call `close`."""

    def __init__(
        self, feeds: Feeds, interest: Interest, *, heartbeat_s: float = HEARTBEAT_S, keys_only: bool = False
    ) -> None:
        self._feeds, self._interest = feeds, interest
        self._heartbeat_s, self._keys_only = max(heartbeat_s, HEARTBEAT_MIN_S), keys_only
        self._plan = WatchPlan(interest)
        self._cursors: dict[PartitionId, FeedCursor] = {}
        self._news = asyncio.Event()
        self.wake = self._news.set
        self._has_trouble = False
        """True if a feed could not be read in this round."""
        self._is_announced = True
        """True if the client knows of all followed feeds."""
        self._ring_version = -1
        """Version of the latest ring whose new partitions are already followed."""
        self._leaving: list[PartitionId] = []
        self._leaving_by = -1
        """Version of the ring for which `_leaving` was computed: the followed feeds that may end."""

    async def messages(self, after: Mapping[str, int], seen: Mapping[str, int]) -> AsyncIterator[kv_pb2.WatchResponse]:
        """Yield messages with changes. `after` is the position to start from and `seen` the sequences that the
        client has seen, both by partition. Raises StoreError: PositionTrimmed, InvalidRequest, Unavailable."""
        first = self._plan.begin(await self._feeds.newest_ring(), after)
        await in_each(first, lambda follow: self._follow(follow, seen))
        yield self._positions()
        sent_at = self._feeds.clock.now()
        while True:
            self._news.clear()
            self._has_trouble = False
            await self._follow_ring()
            is_moving = False
            for cursor in [each for each in self._cursors.values() if not each.is_idle]:
                if self._cursors.get(cursor.partition) is not cursor:
                    continue  # another feed has replaced it
                before = cursor.position
                async for message in self._advance(cursor):
                    yield message
                is_moving |= cursor.position != before or (cursor.is_behind and not self._has_trouble)
            has_changed = await self._end_some() or not self._is_announced
            left_s = sent_at + self._heartbeat_s - self._feeds.clock.now()
            if has_changed or left_s <= 0:
                yield self._positions()
                sent_at = self._feeds.clock.now()
            elif is_moving:
                await asyncio.sleep(0)  # entries of no interest are skipped without waiting
            else:
                await self._wait(min(left_s, RETRY_S) if self._has_trouble else left_s)

    async def close(self) -> None:
        for cursor in list(self._cursors.values()):
            await self._feeds.drop(cursor)
        self._cursors.clear()

    # ── feeds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, follow: FeedToFollow, seen: Mapping[str, int] | None = None) -> None:
        partition, after, time_ms = follow
        if time_ms is not None:
            cursor = await self._feeds.cursor_at(partition, time_ms, self._interest, self.wake)
        else:
            cursor = await self._feeds.cursor(partition, after, self._interest, self.wake, with_handovers=True)
            if after is None and seen:
                cursor.seq = max(cursor.seq, type(cursor.seq)(seen.get(partition, 0)))
        self._cursors[partition] = cursor
        self._plan.positions[partition] = cursor.seq
        self._leaving_by = -1

    async def _end(self, partition: PartitionId) -> None:
        self._plan.ended(partition)
        await self._feeds.drop(self._cursors.pop(partition))

    async def _follow_ring(self) -> None:
        """Follow the partitions that have joined the ring."""
        ring = self._feeds.ring()
        if ring.version == self._ring_version:
            return
        for follow in self._plan.joined(ring):
            if not await self._try_to_follow(follow):
                return
        self._ring_version = ring.version

    async def _try_to_follow(self, follow: FeedToFollow) -> bool:
        try:
            await self._follow(follow)
        except (Retryable, MetadataError):
            self._has_trouble = True
            return False
        self._is_announced = False
        return True

    async def _end_some(self) -> bool:
        """Stop following the feeds that have ended. Return True if there was one."""
        ring, count = self._feeds.ring(), len(self._cursors)
        if ring.version != self._leaving_by:
            self._leaving = [each for each in self._cursors if self._plan.may_end(ring, each)]
            self._leaving_by = ring.version
        for partition in self._leaving:
            cursor = self._cursors.get(partition)
            if cursor is not None and cursor.is_at_end and self._plan.may_end(ring, partition):
                with contextlib.suppress(StoreError):
                    if cursor.position >= (await self._feeds.end(partition))[0]:
                        await self._end(partition)
        return len(self._cursors) != count

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _advance(self, cursor: FeedCursor) -> AsyncIterator[kv_pb2.WatchResponse]:
        """Yield messages with the changes that one feed has now, about one batch."""
        cursor.check()
        try:
            await cursor.fetch()
        except (Retryable, MetadataError):
            self._has_trouble = True
            return
        partition, message, size, is_over = cursor.partition, None, 0, False
        for entry in cursor.ready():
            if entry.handed is not None:
                self._skip()  # what it waits for may have been skipped without interest
            if self._plan.is_held(entry) and not await self._need_not_wait(cursor, entry):
                break
            follow = self._plan.continues_at(entry, partition) if entry.is_behind(cursor.seq) else None
            if follow is not None and not await self._try_to_follow(follow):
                break
            # docs/protocol.md F2: before the position passes a RELEASE, it must include the partition that receives the
            # range.
            if not self._is_announced:
                if message is not None:
                    message.sequence = cursor.seq
                    yield message
                    message, size = None, 0
                self._plan.positions[partition] = cursor.seq
                yield self._positions_message()
            for change, more in self._changes(entry, cursor.seq):
                message = message or kv_pb2.WatchResponse(partition=partition)
                message.changes.append(change)
                size += more
                if size >= MESSAGE_BYTES:
                    message.sequence = change.sequence
                    yield message
                    message, size = None, 0
            is_over = entry.is_behind(cursor.seq) and self._plan.is_over(entry)
            replaced = self._plan.replaces(entry)
            cursor.take(entry)
            if replaced is not None:
                await self._end(replaced)
                self._is_announced = False
            if is_over:
                break
        self._plan.positions[partition] = cursor.seq
        if message is not None:
            message.sequence = cursor.seq
            yield message
        if is_over:
            await self._end(partition)
            yield self._positions()

    # docs/protocol.md F3
    async def _need_not_wait(self, cursor: FeedCursor, held: FeedEntry) -> bool:
        """Check what a held entry waits for. Returns True if it need not wait: no other feed can lead to the former
        owner."""
        follow = self._plan.missed(held)
        if follow is not None:
            if await self._try_to_follow(follow):
                self.wake()
        elif self._plan.is_in_doubt(held) and await self._have_come_past(held.time_ms, cursor):
            self._plan.had(held)
        return not self._plan.is_held(held)

    async def _have_come_past(self, time_ms: int, but: FeedCursor) -> bool:
        """Return True if every feed except `but` has passed the record time or reached its end."""
        for cursor in [each for each in self._cursors.values() if each is not but]:
            ready = cursor.ready()
            if ready:
                following = ready[0]
                # Two entries with the same time must not wait for each other: neither contains what the other waits
                # for.
                if following.time_ms > time_ms or (following.time_ms == time_ms and self._plan.is_held(following)):
                    continue
                return False
            if cursor.is_behind or not await self._has_all(cursor):
                return False
        return True

    async def _has_all(self, cursor: FeedCursor) -> bool:
        """Return True if the cursor is at the true end of its log, not only at the end that this server knows."""
        try:
            if cursor.position >= (await self._feeds.end(cursor.partition))[0]:
                return True
        except StoreError as error:
            log.debug("partition=%s cannot find the end of its log: %r", cursor.partition, error)
        self._has_trouble = True
        return False

    def _changes(self, entry: FeedEntry, after: int) -> Iterator[tuple[kv_pb2.Change, int]]:
        """Yield each change of interest in the entry after the sequence `after`, with its size in bytes."""
        rows = self._interest.rows(entry, after) if entry.keys else ()
        self._feeds.changes_total += len(rows)
        for row in rows:
            kind, key, value, sequence = entry.kinds[row], entry.keys[row], entry.values[row], entry.sequences[row]
            change = kv_pb2.Change(key=key, sequence=sequence, time_ms=entry.time_ms)
            if kind in _DELETES:
                change.expired = kind == EXPIRED
            else:
                change.record.value = b"" if self._keys_only else value
                change.record.version, change.record.created = sequence, entry.created[row]
                change.record.written_ms, change.record.expires_ms = entry.time_ms, entry.expires_ms[row]
            if entry.parts and entry.part_of[row]:
                part = entry.parts[entry.part_of[row] - 1]
                change.transaction, change.transaction_keys = str(part.attempt), part.keys_of_all
            yield change, len(key) + len(value)

    def _positions(self) -> kv_pb2.WatchResponse:
        self._skip()
        return self._positions_message()

    def _skip(self) -> None:
        for partition, cursor in self._cursors.items():
            cursor.ready()  # skips entries of no interest
            self._plan.positions[partition] = cursor.seq

    def _positions_message(self) -> kv_pb2.WatchResponse:
        self._is_announced = True
        return kv_pb2.WatchResponse(positions={str(each): seq for each, seq in self._plan.positions.items()})

    async def _wait(self, seconds: float) -> None:
        await wait_within(self._news, seconds)
