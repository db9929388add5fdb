"""Adds for which no metadata stand: refused, unless the operator admits them; and then only where nobody's entries can
be meant (docs/protocol.md, B28)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.bookie import raw_adds
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.support import KEY, ME, OTHERS, Metadata, Shelf, crash, metadata, packet, run, tiny
from tests.bookie.test_version_two import ADD, ask, frame, number
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

ABSENT, EMPTY, CLOSED, OPEN, ELSEWHERE = 1, 2, 3, 4, 5
NO_KEY = bytes(20)
KEPT_S = 60.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated run has ten minutes."""
    monkeypatch.setattr(raw_adds, "KEPT_S", KEPT_S)


def raw(ledger: int, entry: int) -> bytes:
    """As Apache's benchmark makes it: ids and nothing else, not even a digest."""
    return number(ledger) + number(entry) + bytes(100)


@pytest.fixture
def meta() -> Metadata:
    found = Metadata()
    found.known = {
        ABSENT: None,
        EMPTY: replace(metadata(EMPTY, state=LedgerState.CLOSED), password=bytes(20)),
        CLOSED: metadata(CLOSED, state=LedgerState.CLOSED, last_entry=3),
        OPEN: metadata(OPEN),
        ELSEWHERE: metadata(ELSEWHERE, *OTHERS),
    }
    return found


async def add(peer: Peer, ledger: int, entry: int = 0, *, key: bytes = NO_KEY, recovery: bool = False) -> Status:
    body = raw(ledger, entry)
    return Status((await peer.ask(wire.encode_add(1, ledger, entry, key, body, recovery))).status)


def test_by_itself_a_bookie_stores_nothing_raw(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in meta.known:
            assert await add(peer, ledger) is not Status.OK
        assert not served.shelf.storage.inventory.ledgers

    serve(world, scenario, meta)


def test_a_raw_add_is_stored_and_read_in_both_versions(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in (ABSENT, EMPTY):
            for entry in range(5):
                assert await add(peer, ledger, entry) is Status.OK
            second = await served.connect()
            assert await ask(second, frame(ADD, 0, NO_KEY + raw(ledger, 5))) == (0, b"")
            for entry in range(6):
                assert (await peer.ask(wire.encode_read(2, ledger, entry))).body == raw(ledger, entry)
            assert (await peer.ask(wire.encode_read(2, ledger, 6))).status == Status.NO_ENTRY
            assert await add(peer, ledger, 7, key=b"x" * 20) is not Status.OK, "whoever came first has it"
        assert meta.asked.count(ABSENT) < 4, "not for each add"

    serve(world, scenario, meta, admit_raw_adds=True)


def test_no_ledger_that_is_somebodys_takes_a_raw_add(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in (CLOSED, OPEN, ELSEWHERE):
            assert await add(peer, ledger) is not Status.OK
            assert await add(peer, ledger, key=KEY) is not Status.OK, "its digest is wrong"
        assert await add(peer, ABSENT, recovery=True) is not Status.OK
        meta.is_away = True
        assert await add(peer, ABSENT) is Status.UNKNOWN_LEDGER_STATE
        assert not served.shelf.storage.inventory.ledgers
        meta.is_away = False
        answer = await peer.ask(wire.encode_add(1, OPEN, 0, KEY, packet(OPEN, 0)))
        assert answer.status == Status.OK, "an ordinary add is what it was"
        assert await add(peer, OPEN, 1, key=KEY) is Status.BAD_REQUEST

    serve(world, scenario, meta, admit_raw_adds=True)


def test_a_writer_who_names_the_bookie_as_ours_do_is_refused_as_ever(world: SimWorld, meta: Metadata) -> None:
    """A leader whose ledger was deleted must never be told that its entries are stored."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(wire.encode_bookie_info(1, context=wire.bookie_context(ME)))
        for ledger in (ABSENT, EMPTY):
            answer = await peer.ask(wire.encode_add(1, ledger, 0, KEY, packet(ledger, 0)))
            assert answer.status != Status.OK
        assert await served.shelf.add(ABSENT, 0) is Status.FENCED, "the node's own client too"
        assert not served.shelf.storage.inventory.ledgers

    serve(world, scenario, meta, admit_raw_adds=True)


def test_a_fence_ends_raw_adds_and_outlives_them(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert await add(peer, ABSENT) is Status.OK
        assert (await peer.ask(wire.encode_read(2, ABSENT, 0, fence_key=NO_KEY))).status == Status.OK
        assert await add(peer, ABSENT, 1) is Status.FENCED
        await pause(KEPT_S)
        shelf = served.shelf
        assert await Reclaimer(shelf.env, served.config, shelf.storage, meta).drop_deleted() == [ABSENT]
        assert await add(peer, ABSENT, 2) is Status.FENCED

    serve(world, scenario, meta, admit_raw_adds=True)


async def shelf_with_raw(world: SimWorld, meta: Metadata) -> tuple[Shelf, Reclaimer]:
    config = tiny(admit_raw_adds=True)
    shelf = await Shelf(world.env("b1"), config, meta).start()
    return shelf, Reclaimer(shelf.env, config, shelf.storage, meta)


async def add_to(shelf: Shelf, entry: int) -> Status:
    answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    shelf.storage.raw.add(ABSENT, entry, raw(ABSENT, entry), NO_KEY, done=answered.set_result)
    return await answered


def test_what_is_stored_raw_stays_while_it_is_added_to_and_for_a_while_after(world: SimWorld, meta: Metadata) -> None:
    async def scenario() -> None:
        shelf, reclaimer = await shelf_with_raw(world, meta)
        for entry in range(4):
            assert await add_to(shelf, entry) is Status.OK
            assert await reclaimer.drop_deleted() == []
            await pause(KEPT_S - 1)
        assert await reclaimer.drop_deleted() == []
        await pause(1)
        assert await reclaimer.drop_deleted() == [ABSENT]
        assert await add_to(shelf, 0) is Status.OK, "and may come again"

    run(world, scenario(), "b1")


def test_a_restart_takes_nothing_away_at_once(world: SimWorld, meta: Metadata) -> None:
    async def before() -> None:
        shelf, _ = await shelf_with_raw(world, meta)
        assert await add_to(shelf, 0) is Status.OK

    async def after() -> None:
        shelf, reclaimer = await shelf_with_raw(world, meta)
        await pause(KEPT_S - 1)
        assert await reclaimer.drop_deleted() == []
        assert await add_to(shelf, 1) is Status.OK
        await pause(KEPT_S - 1)
        assert await reclaimer.drop_deleted() == []
        status, body, _ = await shelf.read(ABSENT, 0)
        assert (status, body) == (Status.OK, raw(ABSENT, 0))

    run(world, before(), "b1")
    crash(world, "b1")
    run(world, after(), "b1")
