"""The Feed service: positions, pages of changes, and holds on logs, for all partitions, at any server."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from kvstore.env import Env
from kvstore.env.events import wait_within
from kvstore.env.shared_slots import SharedSlots
from kvstore.errors import (
    InvalidRequest,
    MetadataError,
    NodeExists,
    NoSuchLedger,
    Overloaded,
    PositionTrimmed,
    StoreError,
    Unavailable,
)
from kvstore.meta.store import MetadataStore
from kvstore.partition.state.changes import Interest
from kvstore.proto import feed_pb2, feed_pb2_grpc
from kvstore.ring import PartitionState, Ring
from kvstore.rpc.callers import owner_of
from kvstore.rpc.calls import Few, check_cluster
from kvstore.server.feed.feeds import Feeds
from kvstore.server.feed.pages import FeedPage, PageBounds, interest_in
from kvstore.server.feed.pins import deadline_of
from kvstore.server.feed.tail import FeedCursor
from kvstore.server.routing.backend import Backend
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.lists import LedgerLists, ReadersLists
from kvstore.wal.pins import EVERYTHING, FEED_PIN, Pins

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

WAIT_MAX_MS = 20_000
CALLS_MAX = 256
"""Maximum number of concurrent calls of Changes. A further call displaces the oldest one of the user or network with
the most calls, or is refused if no other has more than its own."""
KEPT_MAX = 64
KEPT_S = 30.0
"""Seconds for which the position of a reader is kept for its next call, so that it need not be looked up again."""
WORK_S = 1.0
"""Seconds after which a page without matching changes is returned. Its `next` has advanced."""
HOLD_MAX_MS = 7 * 24 * 3_600_000
HOLDS_MAX = 256
"""Maximum number of names of holds on one partition's log, because each is a znode there."""
AT_ONCE = 16
"""Maximum number of partitions that one call queries, or moves a hold in, at a time."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ReaderPosition(NamedTuple):
    """A reader's position, and an event that signals new entries."""

    cursor: FeedCursor
    news: asyncio.Event


class FeedService(feed_pb2_grpc.FeedServicer):
    """The gRPC service `kvstore.v1.Feed`: positions, pages of changes, and holds on logs."""

    def __init__(
        self,
        env: Env,
        backend: Backend,
        feeds: Feeds,
        store: MetadataStore,
        caller: Callable[[], str] = lambda: "",
    ) -> None:
        """`caller` returns the user of the current call; empty if access control is off."""
        self._env, self._backend, self._feeds, self._caller = env, backend, feeds, caller
        self._lists = LedgerLists(store)
        # A log that is about to be removed is only in the readers' list, and still waits for pins (docs/protocol.md
        # H5).
        self._pins = Pins(store, ReadersLists(store))
        self._kept: dict[tuple[str, int, bytes, bytes], tuple[ReaderPosition, float]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._readers = SharedSlots(CALLS_MAX, "concurrent readers of changes")
        self._surveys, self._holding = Few("calls of Positions"), Few("calls of Hold")

    def close(self) -> None:
        """Release the kept positions. The feeds close them when they end."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._kept.clear()

    # docs/protocol.md F6
    async def _check_cluster(self, wanted: str) -> None:
        if wanted:
            check_cluster(wanted, await self._feeds.cluster())

    # ── positions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def Positions(self, request: feed_pb2.PositionsRequest, context: Context) -> feed_pb2.PositionsResponse:
        try:
            with self._surveys.place(context):
                return await self._positions()
        except StoreError as error:
            raise _seen_outside(error) from error

    async def _positions(self) -> feed_pb2.PositionsResponse:
        ring = await self._feeds.newest_ring()
        here = [each for each in sorted(ring.partitions) if not ring.has_left(each)]
        response = feed_pb2.PositionsResponse(ring_version=ring.routed, cluster=await self._feeds.cluster())
        readable = {*ring.partitions, *await self._feeds.left(ring)}
        named = sorted({*readable, *ring.retired})
        feeds = {each: response.partitions.add(partition=each, ended=each not in here) for each in named}

        async def find(partition: PartitionId) -> None:
            feed = feeds[partition]
            if not feed.ended:
                listed, _ = await self._lists.read(partition)
                feed.latest = await self._feeds.latest(partition) if listed.ledgers else 0
                feed.oldest = max(0, listed.trimmed_seq - 1)
            else:
                ends = await self._feeds.ends(partition) if partition in readable else None
                feed.oldest, feed.latest = ends or (0, 0)
                feed.gone = ends is None
            feed.servers.extend(self._servers_of(partition))

        await self._in_each(named, find)
        return response

    def _servers_of(self, partition: PartitionId) -> list[str]:
        topology = self._backend.topology
        member = topology.ring.partitions.get(partition)
        leader = topology.leaders.get(partition, ("", 0))[0]
        replicas = sorted(member.replicas if member is not None else (), key=lambda server: server == leader)
        return [topology.servers[each].grpc for each in replicas if each in topology.servers]

    # ── changes ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def Changes(self, request: feed_pb2.ChangesRequest, context: Context) -> feed_pb2.ChangesResponse:
        try:
            async with self._readers.place(owner_of(self._caller(), context)):
                return await self._changes(request)
        except StoreError as error:
            raise _seen_outside(error) from error

    async def _changes(self, request: feed_pb2.ChangesRequest) -> feed_pb2.ChangesResponse:
        await self._check_cluster(request.cluster)
        partition = PartitionId(request.partition)
        if request.until and request.until < request.after:
            raise InvalidRequest(f"expected until >= after, got {request.until} and {request.after}")
        ring = self._feeds.ring()
        if partition not in ring.partitions and partition not in ring.retired:
            _check_partitions([partition], await self._feeds.newest_ring())
        place = await self._place(request)
        is_kept = False
        try:
            page = await self._fill(request, place)
            response = page.finish(place.cursor.latest)
            response.ended = await self._has_ended(place.cursor)
            is_kept = page.is_exact and not response.ended
        finally:
            if is_kept:
                self._keep((partition, response.next, request.start, request.end), place)
            else:
                await self._feeds.drop(place.cursor)
        self._feeds.pages_total += 1
        self._feeds.changes_total += len(response.keys)
        return response

    async def _fill(self, request: feed_pb2.ChangesRequest, place: ReaderPosition) -> FeedPage:
        cursor, news = place
        page = FeedPage(cursor.interest, PageBounds.of(request), request.after, keys_only=request.keys_only)
        now = self._env.clock.now()
        until = now + min(request.wait_ms, WAIT_MAX_MS) / 1000
        work_until = now + max(WORK_S, min(request.wait_ms, WAIT_MAX_MS) / 1000)
        while not page.is_full:
            news.clear()
            cursor.check()
            await cursor.fetch()
            entries = cursor.ready()
            for entry in entries:
                if not page.add(entry):
                    return page
                cursor.take(entry)
            await asyncio.sleep(0)  # a page takes many batches: let other work run in between
            now = self._env.clock.now()
            if entries or cursor.is_behind:
                if now >= work_until:
                    break
                continue
            page.skip_to(cursor.seq)
            if page.is_news or page.is_at_bound or now >= until:
                break
            await wait_within(news, until - now)
        return page

    async def _has_ended(self, cursor: FeedCursor) -> bool:
        if not self._feeds.ring().has_left(cursor.partition) or not cursor.is_at_end:
            return False
        return cursor.position >= (await self._feeds.end(cursor.partition))[0]

    async def _place(self, request: feed_pb2.ChangesRequest) -> ReaderPosition:
        kept = self._kept.pop((request.partition, request.after, request.start, request.end), None)
        if kept is not None:
            return kept[0]
        news = asyncio.Event()
        interest = interest_in(request.start, request.end)
        cursor = await self._feeds.cursor(PartitionId(request.partition), request.after, interest, news.set)
        return ReaderPosition(cursor, news)

    def _keep(self, key: tuple[str, int, bytes, bytes], place: ReaderPosition) -> None:
        now = self._env.clock.now()
        old = self._kept.pop(key, None)
        self._kept[key] = (place, now)
        if old is not None:
            self._drop(old[0])
        while len(self._kept) > KEPT_MAX or next(iter(self._kept.values()))[1] < now - KEPT_S:
            self._drop(self._kept.pop(next(iter(self._kept)))[0])
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_S, self._sweep_kept)

    def _sweep_kept(self) -> None:
        self._sweep = None
        before = self._env.clock.now() - KEPT_S
        for key in [key for key, (_, at) in self._kept.items() if at <= before]:
            self._drop(self._kept.pop(key)[0])
        if self._kept:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_S, self._sweep_kept)

    def _drop(self, place: ReaderPosition) -> None:
        self._env.nursery.spawn(self._feeds.drop(place.cursor), name="drop a feed reader's place")

    # ── holds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def Hold(self, request: feed_pb2.HoldRequest, context: Context) -> feed_pb2.HoldResponse:
        try:
            with self._holding.place(context):
                return await self._hold(request)
        except StoreError as error:
            raise _seen_outside(error) from error

    async def _hold(self, request: feed_pb2.HoldRequest) -> feed_pb2.HoldResponse:
        if not _NAME.fullmatch(request.name) or request.ttl_ms > HOLD_MAX_MS:
            raise InvalidRequest(
                "expected a name of 1 to 64 letters, digits, '-', '_' or '.', and a TTL of at most a week"
            )
        await self._check_cluster(request.cluster)
        clock = self._env.clock
        deadline_ms = deadline_of(clock, request.ttl_ms) if request.ttl_ms else clock.date_ms()
        ring = await self._feeds.newest_ring()
        _check_partitions(request.positions, ring)
        left = await self._feeds.left(ring)
        # Nobody trims the log of a partition that has left: it stays unchanged for the retention, and is then removed.
        named = [PartitionId(each) for each in sorted({*request.positions} - {*left})]
        if request.ttl_ms:
            await self._in_each(named, lambda each: self._check_hold_names(request.name, each))
        await self._in_each(
            named,
            lambda each: self._move_hold(request.name, each, request.positions[each], deadline_ms, request.ttl_ms > 0),
        )
        # Read again: a partition that joined meanwhile has only the holds that existed before.
        members = (await self._feeds.newest_ring()).partitions

        async def follow(partition: PartitionId) -> None:
            if not request.ttl_ms:
                await self._release(partition, await self._pins_of(request.name, partition))
            # a retired partition would stay for as long as it is held
            elif members[partition].state is not PartitionState.RETIRED:
                is_new = members[partition].state is PartitionState.JOINING
                await self._prolong(request.name, partition, deadline_ms, is_new=is_new)

        await self._in_each([each for each in sorted(members) if each not in request.positions], follow)
        return feed_pb2.HoldResponse(deadline_ms=deadline_ms)

    async def _in_each(
        self, partitions: Sequence[PartitionId], work: Callable[[PartitionId], Coroutine[Any, Any, None]]
    ) -> None:
        """Do `work` for all partitions, at most AT_ONCE at a time, because each takes several round trips and the
        caller waits for all of them. Raises the error of the first partition that failed."""
        slots = asyncio.Semaphore(AT_ONCE)
        failures: dict[PartitionId, StoreError] = {}

        async def one(partition: PartitionId) -> None:
            async with slots:
                try:
                    if not failures:
                        await work(partition)
                except StoreError as error:
                    failures[partition] = error

        tasks = [self._env.nursery.spawn(one(each), name=f"feed of {each}") for each in partitions]
        try:
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
        if failures:
            raise failures[min(failures)]

    async def _check_hold_names(self, hold: str, partition: PartitionId) -> None:
        """Raise Overloaded if this hold would exceed the maximum number of hold names."""
        pins = await self._pins.names(partition)
        others = {each.rpartition("@")[0] for each in pins if each.startswith(FEED_PIN)} - {f"{FEED_PIN}{hold}"}
        if len(others) >= HOLDS_MAX:
            raise Overloaded(
                f"partition {partition}: expected at most {HOLDS_MAX} names of holds, got {len(others)} "
                "and one more; release some"
            )

    # docs/protocol.md F6
    async def _move_hold(
        self, hold: str, partition: PartitionId, after: int, deadline_ms: int, is_wanted: bool
    ) -> None:
        """Hold the log's entries after the sequence `after`, and release the pins that the hold had before."""
        name, former = _pin_name(hold, deadline_ms), await self._pins_of(hold, partition)
        if is_wanted:
            ledger = await self._ledger_behind(partition, after)
            if ledger is None:
                await self._pins.hold_on(partition, name, deadline_ms)
            else:
                await self._pin(partition, after, ledger, name, deadline_ms)
            former -= {name}
        await self._release(partition, former)

    async def _prolong(self, hold: str, partition: PartitionId, deadline_ms: int, *, is_new: bool) -> None:
        """Extend the hold on a partition for which the reader has no position yet. Entries that are already held
        stay held. If the partition is new, all of its entries are held."""
        name, former = _pin_name(hold, deadline_ms), await self._pins_of(hold, partition)
        old = [pin.ledger for _, pin in await self._pins.all(partition, _pin_name(hold))]
        if old or is_new:
            await self._pins.hold_on(partition, name, deadline_ms, min(old, default=EVERYTHING))
        await self._release(partition, former - {name})

    async def _pins_of(self, hold: str, partition: PartitionId) -> set[str]:
        return {each for each in await self._pins.names(partition) if each.startswith(_pin_name(hold))}

    async def _release(self, partition: PartitionId, pins: Iterable[str]) -> None:
        for each in sorted(pins):
            await self._pins.release(partition, each)

    async def _ledger_behind(self, partition: PartitionId, after: int) -> LedgerId | None:
        """Return the ledger that contains the position after `after`, or None if nothing has been logged yet."""
        place = await self._feeds.cursor(partition, after, Interest(), lambda: None)
        ledger = place.position.ledger
        await self._feeds.drop(place)
        return ledger if ledger >= 0 else None

    async def _pin(self, partition: PartitionId, after: int, ledger: LedgerId, name: str, deadline_ms: int) -> None:
        try:
            with suppress(NodeExists):  # two requests within one millisecond
                await self._pins.hold(partition, name, ledger, deadline_ms=deadline_ms)
        except NoSuchLedger:
            raise PositionTrimmed(partition, after, (await self._feeds.end(partition))[2]) from None


def _check_partitions(named: Iterable[str], ring: Ring) -> None:
    """Raise InvalidRequest if a partition is not in the ring. Without this check, its name would be looked up in the
    metadata store, and a tail that fails there ends the process."""
    for each in sorted(named):
        if each not in ring.partitions and each not in ring.retired:
            raise InvalidRequest(f"expected one of the partitions {sorted(ring.partitions)}, got {each[:80]!r}")


def _pin_name(hold: str, deadline_ms: int | None = None) -> str:
    """Return the name of a hold's pin with this deadline, or the common prefix of all of the hold's pins if there is
    no deadline."""
    return f"{FEED_PIN}{hold}@{'' if deadline_ms is None else deadline_ms}"


def _seen_outside(error: StoreError) -> StoreError:
    """Return the error to send to the client. An error of the metadata store is replaced by Unavailable, and its
    text goes only to the log, because it may name servers and users of the metadata store."""
    if not isinstance(error, MetadataError):
        return error
    log.info("a feed call failed: %s", error)
    return Unavailable("the metadata store cannot be read now; try again later")
