"""Adds that arrive faster than they can be stored wait, because a writer takes a refusal for a failure and uses other
bookies."""

from __future__ import annotations

import asyncio
from errno import ESTALE

import pytest

from kvstore.bookie.admission import WAITING_MAX
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.support import KEY, Metadata, packet
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7


def adds(entries: range, size: int = 5, ledger: int = L) -> list[bytes]:
    return [wire.encode_add(each, ledger, each, KEY, packet(ledger, each, b"x" * size)) for each in entries]


async def statuses(peer: Peer, count: int) -> list[int]:
    """Return the transactions of `count` answers, which must arrive in the order of the requests."""
    answers = [wire.decode_response(payload) for payload in await peer.answers(count)]
    assert [each.txn for each in answers] == sorted(each.txn for each in answers)
    return [each.status for each in answers]


def test_connection_with_too_many_adds_is_not_read_and_none_is_refused(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        world.node("b1").disk.slow_syncs((1, 1))
        peer.send(*adds(range(1, 41)))
        await pause(0.5)
        (connection,) = served.service.connections
        assert connection._adds == 10
        assert len(connection._backlog) == 30
        assert await statuses(peer, 40) == [Status.OK] * 40
        assert served.shelf.storage.statistics.refused_overload == 0
        assert not connection._is_reading_paused

    serve(world, scenario, connection_pending_max=10)


def test_connection_with_too_many_bytes_in_progress_is_not_read(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        world.node("b1").disk.slow_syncs((1, 1))
        peer.send(*adds(range(1, 41), size=10_000))
        await pause(0.5)
        assert 40_000 < served.shelf.storage.adds.pending_bytes <= 60_000
        assert await statuses(peer, 40) == [Status.OK] * 40

    serve(world, scenario, connection_bytes_max=50_000)


# docs/protocol.md B12
def test_bytes_waiting_for_a_sync_are_limited_over_all_connections(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        peers = [peer, *[await served.connect() for _ in range(4)]]
        await peer.ask(adds(range(1))[0])
        world.node("b1").disk.slow_syncs((1, 1))
        for number, each in enumerate(peers):
            each.send(*adds(range(1 + 20 * number, 21 + 20 * number), size=10_000))
        for _ in range(5):
            await pause(0.5)
            assert served.shelf.storage.adds.pending_bytes <= 70_000
        for each in peers:
            assert await statuses(each, 20) == [Status.OK] * 20
        assert served.shelf.storage.statistics.refused_overload == 0

    serve(world, scenario, pending_bytes_max=50_000)


def test_requests_behind_a_waiting_add_keep_their_order(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        world.node("b1").disk.slow_syncs((1, 1))
        fence = wire.encode_read(99, L, 20, fence_key=KEY)
        late = wire.encode_add(100, L, 21, KEY, packet(L, 21))
        peer.send(*adds(range(1, 21)), fence, late)
        answers = [wire.decode_response(payload) for payload in await peer.answers(22)]
        status = {each.txn: Status(each.status) for each in answers}
        assert status.pop(100) is Status.FENCED
        assert set(status.values()) == {Status.OK}, "the fence sees what was sent before it"

    serve(world, scenario, connection_pending_max=5)


@pytest.mark.parametrize("is_away", [False, True])
def test_first_adds_of_any_number_of_ledgers_wait_for_the_metadata(world: SimWorld, is_away: bool) -> None:
    meta = Metadata()
    meta.is_away = is_away
    wanted = Status.UNKNOWN_LEDGER_STATE if is_away else Status.OK

    async def scenario(served: Served, peer: Peer) -> None:
        others = [peer, *[await served.connect() for _ in range(3)]]
        for number, each in enumerate(others):
            each.send(*adds(range(2000), ledger=L + number))
        assert WAITING_MAX < 4 * 2000
        for each in others:
            assert await statuses(each, 2000) == [wanted] * 2000

    serve(world, scenario, meta)


def test_waiting_adds_are_refused_when_the_disk_becomes_full(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        disk = world.node("b1").disk
        disk.set_capacity(4 << 20)
        disk.slow_syncs((0.2, 0.2))
        peer.send(*adds(range(1, 801), size=10_000))
        answers = sorted(wire.decode_response(payload) for payload in await peer.answers(800))
        found = [each.status for each in answers]
        assert set(found) == {Status.OK, Status.READ_ONLY}
        assert found == sorted(found), "none is stored behind one that is refused"
        assert (await peer.ask(wire.encode_read(900, L, 0))).status == Status.OK

    serve(world, scenario, pending_bytes_max=50_000)


def test_waiting_connections_pass_in_order_until_the_gate_is_shut_again() -> None:
    room, called = 0, []
    gate = BackpressureGate()
    gate.shut(gate)

    def come(name: str) -> None:
        nonlocal room
        room -= 1
        called.append(name)
        if not room:
            gate.shut(gate)

    a, b, c = (lambda name=name: come(name) for name in "abc")
    for each in (a, b, a, c):
        gate.wait(each)
    assert called == []
    room = 2
    gate.open(gate)
    assert called == ["a", "b"]
    assert gate.is_shut
    room = 5
    gate.open(gate)
    assert called == ["a", "b", "c"]
    assert not gate.is_shut


def test_gate_is_open_when_nobody_holds_it_shut() -> None:
    gate, called = BackpressureGate(), []
    for holder in ("one directory", "another"):
        gate.shut(holder)
    gate.wait(lambda: called.append("in"))
    gate.open("one directory")
    assert gate.is_shut
    gate.open("one that never held it")
    assert called == []
    gate.open("another")
    assert called == ["in"]


def test_requests_that_need_metadata_do_not_delay_others(world: SimWorld) -> None:
    """Otherwise an unauthenticated peer that names unknown ledgers stops all writers of a bookie while the metadata
    store hangs: they use other bookies after two seconds, and lose leadership after six."""
    meta = Metadata()

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        meta.gate = asyncio.Event()
        strangers = [await served.connect() for _ in range(3)]
        for number, each in enumerate(strangers):
            each.send(*adds(range(WAITING_MAX), ledger=1000 + number))
            each.send(wire.encode_read(9000, 2000 + number, 0, fence_key=KEY))
        await pause(0.5)
        sent_at = world.loop.time()
        peer.send(*adds(range(1, 100)))
        assert await statuses(peer, 99) == [Status.OK] * 99
        assert (await peer.ask(wire.encode_read(900, L, 50))).status == Status.OK
        assert world.loop.time() - sent_at < 0.5
        newcomer = await served.connect()
        newcomer.send(*adds(range(100), ledger=8))
        await pause(0.5)
        assert newcomer.frames == [], "it waits, and nothing of it is refused"
        meta.gate.set()
        assert await statuses(newcomer, 100) == [Status.OK] * 100
        for each in strangers:
            answers = [wire.decode_response(payload) for payload in await each.answers(WAITING_MAX + 1)]
            assert {answer.status for answer in answers} == {Status.OK, Status.NO_ENTRY}
        assert served.shelf.storage.statistics.refused_overload == 0

    serve(world, scenario, meta)


def test_space_that_cannot_be_read_delays_nobody(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question waits with the adds, and is answered while a synced group is being reported."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(adds(range(1))[0])
        disk = world.node("b1").disk
        disk.slow_syncs((1, 1))
        peer.send(*adds(range(1, 9), size=10_000))
        await pause(0.1)
        assert served.shelf.storage.sync_gate.is_shut

        def failing(_path: str = "") -> int:
            raise OSError(ESTALE, "the file server does not know the file")

        monkeypatch.setattr(disk, "free_bytes", failing)
        other = await served.connect()
        other.send(wire.encode_bookie_info(90))
        reader = asyncio.ensure_future(served.shelf.status(L, 1))
        async with asyncio.timeout(10):
            assert await reader is Status.OK
            assert await statuses(peer, 8) == [Status.OK] * 8
            assert await statuses(other, 1) == [Status.IO_ERROR]

    serve(world, scenario, pending_bytes_max=50_000)
