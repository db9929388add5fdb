"""Pages of the change feed, over logs in memory and a real gRPC endpoint: their contents, and where the next begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import FeedReader
from kvstore.client.feed import PartitionFeed
from kvstore.errors import InvalidRequest, Overloaded, PositionTrimmed, Unavailable
from kvstore.meta import codec, paths
from kvstore.partition.state.changes import FeedEntry, Interest, TransactionPart
from kvstore.partition.state.intents import IntentEffect
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.move_records import Own, Release
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto import feed_pb2, feed_pb2_grpc
from kvstore.ring import PartitionState
from kvstore.ring import codec as codec_of_ring
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.rpc.server import GrpcServer
from kvstore.server.feed import tail
from kvstore.server.feed.pages import FeedPage, PageBounds
from kvstore.server.grpc import feed_service
from kvstore.server.grpc.feed_service import FeedService
from kvstore.types import EntryId, LedgerId, PartitionId, Position, Seq
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pin, Pins
from tests.server.feed.world import World
from tests.waiting import PATIENCE_S, wait_until

P1, P2 = PartitionId("p1"), PartitionId("p2")
AT = Position(LedgerId(1), EntryId(0))
CREATED, OVERWRITTEN, DELETED, EXPIRED = range(1, 5)


class Reading:
    """A reader in a thread, as blocking clients are."""

    def __init__(self, world: World, feed: FeedReader) -> None:
        self.world, self._feed = world, feed

    async def page(self, partition: str, after: int, **options: Any) -> feed_pb2.ChangesResponse:
        return await asyncio.to_thread(partial(self._feed.changes, partition, after, **options))

    async def all(self, partition: str, **options: Any) -> list[feed_pb2.ChangesResponse]:
        """Return all changes, read page by page."""
        pages, after = [], 0
        while True:
            page = await self.page(partition, after, **options)
            pages.append(page)
            if page.next == after:
                return pages
            after = page.next

    def close(self) -> None:
        self._feed.close()

    async def positions(self) -> list[PartitionFeed]:
        return await asyncio.to_thread(self._feed.positions)

    async def hold(self, name: str, positions: dict[str, int], ttl_s: float, **options: Any) -> int:
        return await asyncio.to_thread(partial(self._feed.hold, name, positions, ttl_s, **options))


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[Reading]:
    async with World.open(tmp_path, "p1", "p2") as world, served(world) as address:
        with FeedReader(f"kv://{address}?timeout={PATIENCE_S}s&silence={PATIENCE_S}s") as feed:
            yield Reading(world, feed)


@asynccontextmanager
async def served(world: World) -> AsyncIterator[str]:
    nobody: Any = None
    service = FeedService(world.env, nobody, world.feeds, world.store)
    add: Callable[[Any], None] = partial(feed_pb2_grpc.add_FeedServicer_to_server, service)
    server = GrpcServer(("kvstore.v1.Feed",), (add,))
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.1)
        service.close()


# docs/protocol.md F1
async def test_page_has_every_change_in_columns(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    log.put((b"a", b"1"), (b"b", b"22"))
    log.time_ms = 2_000
    log.put((b"a", b"3"), expires_ms=2_500)
    log.note()
    log.delete(b"b")
    log.time_ms = 2_600
    log.delete(b"a")
    log.empty()
    page = await reading.page("p1", 0)
    assert list(page.keys) == [b"a", b"b", b"a", b"b", b"a"]
    assert list(page.values) == [b"1", b"22", b"3", b"", b""]
    assert list(page.kinds) == [CREATED, CREATED, OVERWRITTEN, DELETED, EXPIRED]
    assert list(page.sequences) == [1, 2, 3, 5, 6]
    assert list(page.created) == [1, 2, 1, 0, 0]
    assert list(page.times_ms) == [1_000, 1_000, 2_000, 2_000, 2_600]
    assert list(page.expires_ms) == [0, 0, 2_500, 0, 0]
    assert (page.next, page.latest, page.time_ms, page.ended) == (6, 6, 2_600, False)


@pytest.mark.parametrize(
    "bounds", [{"rows_max": 1}, {"rows_max": 2}, {"rows_max": 3}, {"bytes_max": 1}, {"bytes_max": 150}], ids=str
)
async def test_pages_of_any_size_contain_each_change_once(reading: Reading, bounds: dict[str, int]) -> None:
    log = reading.world.logs["p1"]
    for number in range(4):
        log.put(*((b"%d%d" % (number, row), b"x" * 50) for row in range(3)))
        log.note()
    pages = await reading.all("p1", **bounds)
    assert [seq for page in pages for seq in page.sequences] == [seq for seq in range(1, 17) if seq % 4]
    assert pages[-1].next == 16
    assert max(len(page.keys) for page in pages) <= bounds.get("rows_max", 2)


async def test_page_ends_at_the_requested_position(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    for _ in range(3):
        log.put((b"a", b""), (b"b", b""), (b"c", b""))
    page = await reading.page("p1", 1, until=5)
    assert (list(page.sequences), page.next) == ([2, 3, 4, 5], 5)
    page = await reading.page("p1", 5, until=5)
    assert (list(page.sequences), page.next) == ([], 5)


async def test_page_without_interest_advances(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    log.put((b"a", b"1"), (b"b", b"2"), (b"c", b"3"))
    page = await reading.page("p1", 0, start=b"b", end=b"c", keys_only=True)
    assert (list(page.keys), list(page.values), page.next) == ([b"b"], [b""], 3)
    page = await reading.page("p1", 0, start=b"x")
    assert (list(page.keys), page.next) == ([], 3)


async def test_bounds_are_reached_across_entries_without_changes(reading: Reading) -> None:
    """A position that had advanced over it, and whose memory was lost, used to stay there until the next change."""
    log = reading.world.logs["p1"]
    log.put((b"a", b"1"))
    assert (await reading.page("p1", 0, start=b"z")).next == 1
    for number in range(4):
        log.put((b"a", b"%d" % number))
    assert (await reading.all("p1"))[-1].next == 5
    for until in (2, 3, 5):
        page = await reading.page("p1", until - (2 if until == 5 else 1), until=until, start=b"z")
        assert (list(page.keys), page.next) == ([], until)


def test_page_reaches_its_bound_before_a_later_entry() -> None:
    """The entries in between do not match and were skipped. The reader must not request them again forever."""
    page = FeedPage(Interest(), PageBounds(until=583, rows=10, bytes=1000), 579, keys_only=False)
    assert not page.add(FeedEntry(AT, Seq(583), Seq(717), 1_000))
    assert (page.is_full, page.finish(717).next) == (True, 583)


async def test_waiting_reader_gets_new_changes(reading: Reading) -> None:
    waiting = asyncio.ensure_future(reading.page("p1", 0, wait_ms=4_000))

    async def is_waiting() -> bool:
        return reading.world.feeds.known_tail(P1) is not None

    await wait_until(is_waiting)
    reading.world.logs["p1"].put((b"a", b"1"))
    assert list((await waiting).keys) == [b"a"]


# docs/protocol.md F9
async def test_waiting_reader_gets_a_part_that_changes_nothing(reading: Reading) -> None:
    """A transaction is complete once all of its parts have arrived, so a part wakes the readers of all keys."""
    waiting = asyncio.ensure_future(reading.page("p1", 0, wait_ms=1_500))

    async def is_waiting() -> bool:
        return reading.world.feeds.known_tail(P1) is not None

    await wait_until(is_waiting)
    attempt = Attempt(P2, 3, 7)
    reading.world.logs["p1"].commit(b"a", attempt, IntentEffect.NONE, 5)
    page = await waiting
    assert list(page.keys) == []
    assert [(each.transaction, each.keys_of_all) for each in page.parts] == [(str(attempt), 5)]


def test_page_ends_at_a_limited_number_of_parts() -> None:
    """A page of a range without changes had the parts of all transactions of a second, so no message could carry it."""
    page, sequence = FeedPage(Interest(b"x", b"y"), PageBounds(0, 10, 1 << 20), 0, keys_only=False), 0
    for number in range(1_000):
        entry = FeedEntry(Position(LedgerId(1), EntryId(number)), Seq(sequence), Seq(sequence + 100), 1)
        entry.parts = [
            TransactionPart(Attempt(P1, 12, seq), Seq(seq), 1, 2) for seq in range(sequence + 1, sequence + 101)
        ]
        if not page.add(entry):
            break
        sequence += 100
    assert page.is_full
    assert page.is_exact
    assert page.message.next == sequence == page.message.parts[-1].sequence
    assert page.finish(1 << 40).ByteSize() < MESSAGE_BYTES_MAX
    rest = FeedPage(Interest(b"x", b"y"), PageBounds(0, 10, 1 << 20), sequence, keys_only=False)
    assert rest.add(entry)
    assert rest.message.parts[0].sequence == sequence + 1


async def test_waiting_reader_advances_over_uninteresting_entries(reading: Reading) -> None:
    waiting = asyncio.ensure_future(reading.page("p1", 0, start=b"x", wait_ms=300))

    async def is_waiting() -> bool:
        return reading.world.feeds.known_tail(P1) is not None

    await wait_until(is_waiting)
    reading.world.logs["p1"].put((b"a", b"1"))
    page = await waiting
    assert (list(page.keys), page.next) == ([], 1)


async def test_reader_continues_without_search(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    for _ in range(10):
        log.put((b"a", b""), (b"b", b""))
    await reading.all("p1", rows_max=3)
    assert reading.world.logs.seeker.searches == 1


async def test_page_reports_handovers(reading: Reading) -> None:
    old, new, span = reading.world.logs["p1"], reading.world.logs["p2"], TokenSpan(7, 9)
    old.put((b"a", b""), (b"b", b""))
    old.record(Release(4, AT, 1, P2, span))
    new.put((b"x", b""))
    new.record(Own(4, AT, AT, 2, 5, P1, span))
    assert (await reading.page("p2", 0)).next == 2, "as far as the old owner had come"
    new.put((b"a", b""))
    gone, come = await reading.page("p1", 0), await reading.page("p2", 0)
    (left,), (got,) = gone.handovers, come.handovers
    assert (left.owned, left.sequence, left.peer, left.move) == (False, 2, "p2", 4)
    assert (left.first_token, left.last_token) == (7, 9)
    assert (got.owned, got.sequence, got.peer, got.peer_sequence, got.move) == (True, 1, "p1", 2, 4)
    assert list(come.sequences) == [1, 3], "sequences go on behind the old owner's"


# docs/protocol.md F6
async def test_trimmed_position_has_its_own_error(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    for _ in range(2):
        log.put((b"a", b""), (b"b", b""))
        log.roll()
    log.trim(1)
    with pytest.raises(PositionTrimmed) as error:
        await reading.page("p1", 1)
    assert (error.value.partition, error.value.asked, error.value.oldest) == ("p1", 1, 2)
    assert list((await reading.page("p1", 2)).sequences) == [3, 4]


async def test_trimmed_position_is_valid_if_reader_has_everything(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "WINDOW_ENTRIES", 1)
    log = reading.world.logs["p1"]
    log.put((b"a", b""))
    assert (await reading.page("p1", 0)).next == 1
    log.record(Release(4, AT, 1, P2, TokenSpan(7, 9)))
    log.roll()
    log.put((b"a", b""), (b"b", b""))
    log.put((b"c", b""))
    log.trim(1)
    assert list((await reading.page("p1", 1, wait_ms=1_000)).sequences) == [2, 3, 4]


async def test_handover_right_after_page_is_repeated(reading: Reading) -> None:
    log = reading.world.logs["p1"]
    log.put((b"a", b""))
    assert (await reading.page("p1", 0)).next == 1
    log.record(Release(4, AT, 1, P2, TokenSpan(7, 9)))
    for _ in range(2):
        assert [each.move for each in (await reading.page("p1", 1, wait_ms=300)).handovers] == [4]


async def test_partition_that_left_is_read_to_its_end(reading: Reading) -> None:
    log = reading.world.logs["p2"]
    for _ in range(3):
        log.put((b"a", b""))
    reading.world.leave("p2")
    first = await reading.page("p2", 0, rows_max=2)
    assert (first.next, first.ended) == (2, False)
    last = await reading.page("p2", first.next)
    assert (last.next, last.ended) == (3, True)


async def test_unknown_new_partition_has_not_left(reading: Reading) -> None:
    """Otherwise no reader would ever continue."""
    await reading.world.join_unheard("p3")
    reading.world.logs["p3"].put((b"a", b""))
    page = await reading.page("p3", 0)
    assert (page.next, page.ended) == (1, False)


async def test_unknown_partition_is_refused(reading: Reading) -> None:
    with pytest.raises(InvalidRequest, match="p9"):
        await reading.page("p9", 0)


@pytest.mark.parametrize("bounds", [(b"k" * 4098, b""), (b"", b"k" * (1 << 20)), (b"b", b"a")], ids=["1", "2", "3"])
async def test_bound_longer_than_a_key_is_refused(reading: Reading, bounds: tuple[bytes, bytes]) -> None:
    """A megabyte of it would be kept for each watch and each position."""
    start, end = bounds
    with pytest.raises(InvalidRequest, match="expected"):
        await reading.page("p1", 0, start=start, end=end)
    with pytest.raises(InvalidRequest, match="expected"):
        await reading.world.watch(Interest(start, end))


async def test_position_beyond_the_end_is_refused_and_not_held(reading: Reading) -> None:
    last = reading.world.logs["p1"].put((b"a", b"1"))
    assert (await reading.page("p1", last)).next == last
    with pytest.raises(InvalidRequest, match=f"expected a position up to {last}, where its log ends, got {last + 1}"):
        await reading.page("p1", last + 1)
    with pytest.raises(InvalidRequest, match=f"expected a position up to {last}, where its log ends, got {last + 1}"):
        await reading.hold("h", {"p1": last + 1}, 60.0)


async def test_positions_name_their_cluster(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeedService, "_servers_of", lambda *_: [])
    feeds = await reading.positions()
    assert [(each.partition, each.cluster) for each in feeds] == [("p1", "the cluster"), ("p2", "the cluster")]


async def test_partition_that_left_is_listed_permanently(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that was away while the partition joined and left could not know that it missed changes."""
    monkeypatch.setattr(FeedService, "_servers_of", lambda *_: [])
    world = reading.world
    last = world.logs["p2"].put((b"a", b""), (b"b", b""))
    world.leave("p2")

    async def told() -> PartitionFeed:
        return next(each for each in await reading.positions() if each.partition == "p2")

    await world.store.set(paths.RING, codec_of_ring.encode(world.ring), -1)
    for path in (paths.KEPT, paths.kept_log(P2)):
        await world.store.create(path, b"")
    assert (await told())[1:4] == (0, last, True)
    assert not (await told()).gone
    await world.store.delete(paths.kept_log(P2), -1)
    assert await told() == PartitionFeed("p2", 0, 0, True, (), "the cluster", True)


async def test_log_that_never_existed_is_not_gone(reading: Reading) -> None:
    """A partition whose join was cancelled before it had a ledger used to end all streams."""
    world = reading.world
    world.logs["p2"].ledgers = []
    assert await world.feeds.ends(P2) == (0, 0), "the ring has it, as one that has retired"
    world.leave("p2")
    await world.store.set(paths.RING, codec_of_ring.encode(world.ring), -1)
    assert await world.feeds.ends(P2) is None
    for path in (paths.KEPT, paths.kept_log(P2)):
        await world.store.create(path, b"")
    assert await world.feeds.ends(P2) == (0, 0)
    page = await reading.page("p2", 0)
    assert (page.next, page.ended) == (0, True)


async def test_closed_reader_opens_no_connection(reading: Reading) -> None:
    await reading.page("p1", 0)
    reading.close()
    with pytest.raises(Unavailable, match="closed"):
        await reading.page("p1", 0)


async def test_hold_pins_the_log_until_its_deadline(reading: Reading) -> None:
    world, log = reading.world, reading.world.logs["p1"]
    log.put((b"a", b""))
    log.roll()
    log.put((b"a", b""))
    await world.store.create("/partitions", b"")
    await world.store.create("/partitions/p1", b"")
    await world.store.create(paths.partition_log(P1), codec.encode(LedgerList(1, tuple(log.ledgers))))

    async def pins() -> list[tuple[str, Pin]]:
        names = sorted(await world.store.children(paths.partition_pins(P1)))
        found = [(name, await world.store.get(paths.partition_pin(P1, name))) for name in names]
        return [(name, codec.decode(Pin, data, what=name)) for name, (data, _) in found]

    deadline = await reading.hold("stream", {"p1": 0}, 60)
    ((name, pin),) = await pins()
    assert name.startswith("feed-stream@")
    assert (pin.ledger, pin.deadline_ms) == (1, deadline)
    await reading.hold("stream", {"p1": 2}, 60)
    ((_, pin),) = await pins()
    assert pin.ledger == 2, "moved on"
    await reading.hold("stream", {"p1": 2}, 0)
    assert await pins() == []
    log.trim(1)
    with pytest.raises(PositionTrimmed):
        await reading.hold("stream", {"p1": 0}, 60)


# docs/protocol.md F6
async def test_hold_that_is_moved_twice_at_once_is_kept(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client repeats a call that was not answered. Each call released the pin of the other."""
    world, both, hold = reading.world, asyncio.Barrier(2), Pins.hold
    world.logs["p1"].put((b"a", b""))
    pins = Pins(world.store, LedgerLists(world.store))
    await LedgerLists(world.store).make(P1)
    await LedgerLists(world.store).write(P1, world.logs["p1"].listed, 0)

    async def hold_together(*given: Any, **options: Any) -> None:
        await hold(*given, **options)
        await both.wait()

    monkeypatch.setattr(Pins, "hold", hold_together)
    async with asyncio.timeout(PATIENCE_S):
        deadlines = await asyncio.gather(*(reading.hold("stream", {"p1": 1}, ttl_s) for ttl_s in (60, 70)))
    assert {name for name, _ in await pins.all(P1)} & {f"feed-stream@{each}" for each in deadlines}


# docs/protocol.md H5, F6
async def test_hold_of_log_being_retired_pins_it(reading: Reading) -> None:
    """Its list is already empty, and the ring still has the partition. Streams used to end as if trimmed."""
    world, log = reading.world, reading.world.logs["p1"]
    log.put((b"a", b""))
    log.roll()
    log.put((b"a", b""))
    retired = replace(world.ring.partitions[P1], state=PartitionState.RETIRED)
    world.ring = replace(world.ring, version=9, partitions={**world.ring.partitions, P1: retired})
    await world.store.set(paths.RING, codec_of_ring.encode(world.ring), -1)
    for path in ("/partitions", "/partitions/p1", paths.KEPT):
        await world.store.create(path, b"")
    await world.store.create(paths.partition_log(P1), codec.encode(LedgerList()))
    await world.store.create(paths.kept_log(P1), codec.encode(LedgerList(1, tuple(log.ledgers[1:]))))
    await reading.hold("stream", {"p1": 2}, 60)
    pins = Pins(world.store, LedgerLists(world.store))
    assert [pin.ledger for _, pin in await pins.all(P1)] == [2]
    with pytest.raises(PositionTrimmed):
        await reading.hold("stream", {"p1": 0}, 60)


async def test_hold_covers_partitions_that_join(reading: Reading) -> None:
    """One pin omits a partition, the other belongs to a partition without a log: its future changes are kept."""
    world = reading.world
    joining = replace(world.ring.partitions[P2], id=PartitionId("p3"), state=PartitionState.JOINING)
    retired = replace(joining, id=PartitionId("p4"), state=PartitionState.RETIRED)
    members = {each.id: each for each in (*world.ring.partitions.values(), joining, retired)}
    world.ring = replace(world.ring, version=9, partitions=members)
    await world.store.set(paths.RING, codec_of_ring.encode(world.ring), -1)
    world.logs["p2"].ledgers = []
    pins = Pins(world.store, LedgerLists(world.store))

    async def held() -> dict[str, list[int]]:
        return {each: [pin.ledger for _, pin in await pins.all(PartitionId(each))] for each in ("p1", "p2", "p3", "p4")}

    await pins.hold_on(P2, "feed-stream@1", 1)
    await pins.hold_on(P1, "feed-stream@1", 1, LedgerId(3))
    await pins.hold_on(retired.id, "feed-stream@1", 1, LedgerId(4))
    for ttl_s in (60, 70):
        await reading.hold("stream", {"p2": 0}, ttl_s)
        assert await held() == {"p1": [3], "p2": [0], "p3": [0], "p4": [4]}
    assert [name for name, _ in await pins.all(retired.id)] == ["feed-stream@1"], "or it would never be gone"
    await reading.hold("stream", {"p1": 0}, 0)
    assert await held() == {"p1": [], "p2": [], "p3": [], "p4": []}, "given back, all of it"


async def test_hold_names_are_limited_and_existing_ones_continue(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pin is a znode of every partition, for up to a week."""
    monkeypatch.setattr(feed_service, "HOLDS_MAX", 2)
    world = reading.world
    world.logs["p2"].put((b"a", b""))
    for path in ("/partitions", "/partitions/p2"):
        await world.store.create(path, b"")
    await world.store.create(paths.partition_log(P2), codec.encode(LedgerList(1, tuple(world.logs["p2"].ledgers))))
    for name in ("one", "two", "one"):
        await reading.hold(name, {"p2": 0}, 60)
    with pytest.raises(Overloaded, match="partition p2: expected at most 2 names of holds"):
        await reading.hold("three", {"p2": 0}, 60, timeout_s=2.0)
    assert len(await world.store.children(paths.partition_pins(P2))) == 2
    await reading.hold("two", {"p2": 0}, 0)
    await reading.hold("three", {"p2": 0}, 60)


async def test_hold_skips_partitions_that_left(reading: Reading) -> None:
    """Its log remains for a time without a pin. A stream that starts with it would be refused and keep no log."""
    world = reading.world
    for partition in ("p1", "p2"):
        world.logs[partition].put((b"a", b""))
    world.leave("p1")
    for path in (paths.KEPT, paths.kept_log(P1), "/partitions", "/partitions/p2"):
        await world.store.create(path, b"")
    await world.store.create(paths.partition_log(P2), codec.encode(LedgerList(1, tuple(world.logs["p2"].ledgers))))
    await reading.hold("stream", {"p1": 0, "p2": 0}, 60)
    assert len(await world.store.children(paths.partition_pins(P2))) == 1
    assert await world.store.children("/partitions") == ["p2"]


@pytest.mark.parametrize("name", ["p9", "", ".", "a\n\0b", "../p1", "p" * 5000])
async def test_hold_of_unknown_partition_is_refused(reading: Reading, name: str) -> None:
    """This used to end the process: a task that must not fail looked up its name in the metadata store."""
    world = reading.world
    with pytest.raises(InvalidRequest, match="one of the partitions"):
        await reading.hold("stream", {name: 1}, 60)
    assert world.feeds.known_tail(PartitionId(name)) is None
    assert (await reading.page("p1", 0)).next == 0
