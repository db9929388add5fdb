"""Readers of the feed at servers without the partition, at bounds without later changes, and with many partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.client import FeedReader
from kvstore.env.clock import SystemClock
from kvstore.errors import Overloaded, Unavailable
from kvstore.proto import feed_pb2
from kvstore.server.feed import end
from kvstore.server.feed.end import latest_of
from kvstore.server.grpc import feed_service
from kvstore.server.grpc.feed_service import FeedService
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.server.feed.test_pages_feed import P1, Reading, served
from tests.server.feed.world import World
from tests.waiting import PATIENCE_S

PATIENT = f"?timeout={PATIENCE_S}s&silence={PATIENCE_S}s"


@pytest.fixture
async def reading(tmp_path: Path) -> AsyncIterator[Reading]:
    async with World.open(tmp_path, "p1", "p2") as world, served(world) as address:
        with FeedReader(f"kv://{address}?timeout=4s") as feed:
            yield Reading(world, feed)


# docs/protocol.md F6
async def test_server_of_another_cluster_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are reused, and partitions have the same names in every cluster."""
    monkeypatch.setattr(FeedService, "_servers_of", lambda *_: [])
    async with (
        World.open(tmp_path / "ours", "p1") as ours,
        World.open(tmp_path / "theirs", "p1", cluster="another") as theirs,
        served(theirs) as there,
    ):
        for world, value in ((ours, b"ours"), (theirs, b"theirs")):
            world.logs["p1"].put((b"a", value), (b"b", value))
        async with served(ours) as here:
            feed = FeedReader(f"kv://{here},{there}{PATIENT}")
            assert [each.cluster for each in await Reading(ours, feed).positions()] == ["the cluster"]
            known = Reading(ours, FeedReader(f"kv://{there},{here}{PATIENT}", "the cluster"))
            assert list((await known.page("p1", 0)).values) == [b"ours", b"ours"]
            assert [each.cluster for each in await known.positions()] == ["the cluster"]
            known.close()
        for call in (partial(feed.changes, "p1", 0), partial(feed.hold, "h", {"p1": 1}, 60.0), feed.positions):
            with pytest.raises(Unavailable):
                await asyncio.to_thread(call, timeout_s=1.0)
        feed.close()
        assert await Pins(theirs.store, LedgerLists(theirs.store)).all(P1) == [], "nothing is held there"
        with FeedReader(f"kv://{there}?timeout=5s", "the cluster") as strict:
            with pytest.raises(Unavailable, match=r"of another cluster.*: (want|expected) the cluster, got another"):
                await Reading(ours, strict).page("p1", 0)
            with pytest.raises(Unavailable, match="is another cluster: expected a server of 'the cluster'"):
                await Reading(ours, strict).positions()


async def test_page_at_its_bound_does_not_wait(reading: Reading) -> None:
    """Later entries are beyond the bound. Each partition without a matching key used to cost the whole wait."""
    last = reading.world.logs["p1"].put(*((b"a%d" % each, b"") for each in range(5)))
    for after in (0, last):
        page = await reading.page("p1", after, until=last, wait_ms=20_000, start=b"x", end=b"y", timeout_s=1.0)
        assert (page.next, list(page.keys)) == (last, [])
    began = asyncio.get_running_loop().time()
    assert (await reading.page("p1", 0, until=last, wait_ms=20_000, start=b"x")).next == last
    assert asyncio.get_running_loop().time() - began < PATIENCE_S


# docs/protocol.md P31
async def test_server_without_a_date_leaves_a_hold_as_it_was(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its wall clock, which has just started in 1970, the hold would be over for all other servers."""
    reading.world.logs["p1"].put((b"a", b"1"))
    lists = LedgerLists(reading.world.store)
    await lists.make(P1)
    await lists.write(P1, reading.world.logs["p1"].listed, 0)
    pins = Pins(reading.world.store, lists)
    deadline_ms = await reading.hold("h", {"p1": 0}, 60.0)
    before = await pins.all(P1)
    assert [pin.deadline_ms for _, pin in before] == [deadline_ms]
    monkeypatch.setattr(SystemClock, "date_ms", lambda _: 1_000)
    monkeypatch.setattr(SystemClock, "may_lead", lambda _: False)
    with pytest.raises(Unavailable, match="not sure of its date"):
        await reading.hold("h", {"p1": 0}, 60.0, timeout_s=1.0)
    assert await pins.all(P1) == before
    await reading.hold("h", {"p1": 0}, 0.0)
    assert await pins.all(P1) == [], "a release needs no date"


async def test_hold_of_many_partitions_moves_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another they used to take longer than a server's time limit, and each attempt started over."""
    names = [f"p{number}" for number in range(60)]
    moving: list[str] = []
    times_s: list[float] = []
    many, hold = asyncio.Event(), FeedService.Hold

    async def move(self: FeedService, hold: str, partition: PartitionId, *_: Any) -> None:
        moving.append(partition)
        if len(moving) == feed_service.AT_ONCE:
            many.set()
        await many.wait()

    async def timed(self: FeedService, request: feed_pb2.HoldRequest, context: Any) -> feed_pb2.HoldResponse:
        times_s.append(context.time_remaining())
        return await hold(self, request, context)

    monkeypatch.setattr(FeedService, "_move_hold", move)
    monkeypatch.setattr(FeedService, "Hold", timed)
    async with World.open(tmp_path, *names) as world, served(world) as address:
        with FeedReader(f"kv://{address}?timeout={PATIENCE_S}s") as feed:
            await Reading(world, feed).hold("h", dict.fromkeys(names, 0), 60.0)
    assert sorted(moving) == sorted(names)
    assert times_s[0] > PATIENCE_S / 4


async def test_positions_of_many_partitions_are_read_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of an idle partition is written to before its leader reports its end."""
    names = [f"p{number}" for number in range(60)]
    asked: list[str] = []
    times_s: list[float] = []
    many, positions = asyncio.Event(), FeedService.Positions

    async def latest(partition: PartitionId) -> int:
        asked.append(partition)
        if len(asked) == feed_service.AT_ONCE:
            many.set()
        await many.wait()
        return int(partition.removeprefix("p"))

    async def timed(self: FeedService, request: feed_pb2.PositionsRequest, context: Any) -> feed_pb2.PositionsResponse:
        times_s.append(context.time_remaining())
        return await positions(self, request, context)

    async def listed(_: LedgerLists, partition: PartitionId) -> tuple[LedgerList, int]:
        return world.logs[partition].listed, 1

    monkeypatch.setattr(FeedService, "Positions", timed)
    monkeypatch.setattr(FeedService, "_servers_of", lambda *_: [])
    monkeypatch.setattr(LedgerLists, "read", listed)
    async with World.open(tmp_path, *names) as world, served(world) as address:
        monkeypatch.setattr(world.feeds, "latest", latest)
        with FeedReader(f"kv://{address}?timeout={PATIENCE_S}s") as feed:
            found = await Reading(world, feed).positions()
    assert [(each.partition, each.latest) for each in found] == sorted((each, int(each[1:])) for each in names)
    assert times_s[0] > PATIENCE_S / 4


async def test_reader_learns_which_partition_does_not_answer(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    async def latest(partition: PartitionId) -> int:
        return await latest_of(reading.world.env.clock, cast(Backend, None), partition)

    async def nobody(*_: object) -> None:
        await asyncio.Event().wait()

    async def listed(_: LedgerLists, partition: PartitionId) -> tuple[LedgerList, int]:
        return reading.world.logs[partition].listed, 1

    monkeypatch.setattr(end, "ask", nobody)
    monkeypatch.setattr(LedgerLists, "read", listed)
    monkeypatch.setattr(reading.world.feeds, "latest", latest)
    with pytest.raises(Unavailable, match="partition p1: its leader does not answer"):
        await reading.positions()


class Called:
    """A call from an address."""

    def __init__(self, address: str) -> None:
        self._peer = f"ipv4:{address}:1"

    def peer(self) -> str:
        return self._peer


async def test_readers_of_one_network_leave_slots_for_another(tmp_path: Path) -> None:
    """One reader with many partitions used to keep all others from reading changes at this server."""
    nobody: Any = None
    async with World.open(tmp_path, "p1") as world:
        service = FeedService(world.env, nobody, world.feeds, world.store)
        service._readers.most = 3
        request = feed_pb2.ChangesRequest(partition="p1", wait_ms=feed_service.WAIT_MAX_MS)

        def begun(address: str) -> tuple[Any, asyncio.Future[feed_pb2.ChangesResponse]]:
            context: Any = Called(address)
            return context, asyncio.ensure_future(service.Changes(request, context))

        many = [begun("10.0.0.1") for _ in range(3)]
        await asyncio.sleep(0)
        few, refused = begun("10.0.0.2"), begun("10.0.0.1")
        async with asyncio.timeout(PATIENCE_S):
            for _, reading in (many[0], refused):
                with pytest.raises(Overloaded):
                    await reading
            world.logs["p1"].put((b"a", b"1"))
            for _, reading in (few, *many[1:]):
                assert list((await reading).keys) == [b"a"]
        assert len(service._readers) == 0
        service.close()
