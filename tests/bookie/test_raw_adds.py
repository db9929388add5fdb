"""Adds that do not come from the ledger's writer: refused unless the operator admits them, and then only to ledgers
without countable entries (docs/protocol.md, B28)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.bookie import raw_adds
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import DigestType, EntryId, LedgerId, LedgerState
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.peers.test_version_two import ADD, ask, frame, number
from tests.bookie.support import KEY, ME, OTHERS, Metadata, Shelf, crash, metadata, packet, run, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

ABSENT, EMPTY, CLOSED, OPEN, ELSEWHERE = 1, 2, 3, 4, 5
NO_KEY = bytes(20)
ITS_KEY = master_key(bytes(20))
"""The key of the ledger that is closed and empty."""


def raw(ledger: int, entry: int) -> bytes:
    """Return an add of Apache's benchmark: only ids, without a digest."""
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


def test_bookie_stores_no_raw_adds_by_default(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in meta.known:
            assert await add(peer, ledger) is not Status.OK
        assert not served.shelf.storage.inventory.ledgers

    serve(world, scenario, meta)


# docs/protocol.md B36
def test_raw_add_replaces_no_other_packet(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert await add(peer, EMPTY, 3) is Status.OK
        other = raw(EMPTY, 3)[:-1] + b"x"
        answer = await peer.ask(wire.encode_add(1, EMPTY, 3, NO_KEY, other))
        assert Status(answer.status) is Status.FENCED
        assert await add(peer, EMPTY, 3) is Status.OK, "a repetition"
        assert (await peer.ask(wire.encode_read(2, EMPTY, 3))).body == raw(EMPTY, 3)

    serve(world, scenario, meta, admit_raw_adds=True)


def test_raw_add_is_stored_and_read_in_both_protocol_versions(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for entry in range(5):
            assert await add(peer, EMPTY, entry) is Status.OK
        second = await served.connect()
        assert await ask(second, frame(ADD, 0, NO_KEY + raw(EMPTY, 5))) == (0, b"")
        for entry in range(6):
            assert (await peer.ask(wire.encode_read(2, EMPTY, entry))).body == raw(EMPTY, entry)
        assert (await peer.ask(wire.encode_read(2, EMPTY, 6))).status == Status.NO_ENTRY
        assert await add(peer, EMPTY, 7, key=b"x" * 20) is not Status.OK, "the first sender has it"
        assert meta.asked.count(EMPTY) < 4, "not for each add"

    serve(world, scenario, meta, admit_raw_adds=True)


def test_raw_add_to_a_ledger_with_a_writer_is_refused(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        for ledger in (ABSENT, CLOSED, OPEN, ELSEWHERE):
            assert await add(peer, ledger) is not Status.OK
            assert await add(peer, ledger, key=KEY) is not Status.OK, "its digest is wrong"
        assert await add(peer, EMPTY, recovery=True) is not Status.OK
        meta.is_away = True
        assert await add(peer, EMPTY, key=b"x" * 20) is Status.UNKNOWN_LEDGER_STATE
        assert not served.shelf.storage.inventory.ledgers
        meta.is_away = False
        answer = await peer.ask(wire.encode_add(1, OPEN, 0, KEY, packet(OPEN, 0)))
        assert answer.status == Status.OK, "an ordinary add is what it was"
        assert await add(peer, OPEN, 1, key=KEY) is Status.BAD_REQUEST

    serve(world, scenario, meta, admit_raw_adds=True)


def test_writer_that_names_the_bookie_is_refused_as_usual(world: SimWorld, meta: Metadata) -> None:
    """A leader whose ledger was deleted must never get the answer that its entries are stored."""

    async def scenario(served: Served, peer: Peer) -> None:
        await peer.ask(wire.encode_bookie_info(1, context=wire.bookie_context(ME)))
        for ledger in (ABSENT, EMPTY):
            answer = await peer.ask(wire.encode_add(1, ledger, 0, KEY, packet(ledger, 0)))
            assert answer.status != Status.OK
        assert await served.shelf.add(ABSENT, 0) is Status.FENCED, "the node's own client too"
        assert not served.shelf.storage.inventory.ledgers

    serve(world, scenario, meta, admit_raw_adds=True)


@pytest.mark.parametrize("kind", DigestType)
def test_writer_of_a_ledger_closed_without_its_entries_is_refused(
    world: SimWorld, meta: Metadata, kind: DigestType
) -> None:
    """Apache's writers name no bookie. This one was away while its ledger was recovered, and a fenced bookie has lost
    its disk since. Another bookie at the same address must not store its entries, whatever their digest."""
    meta.known[EMPTY] = replace(metadata(EMPTY, state=LedgerState.CLOSED), password=bytes(20), digest=kind)

    async def scenario(served: Served, peer: Peer) -> None:
        body = EntryDigest(kind, bytes(20)).packet(LedgerId(EMPTY), EntryId(0), EntryId(-1), 5, b"hello")
        answer = await peer.ask(wire.encode_add(1, EMPTY, 0, ITS_KEY, body))
        assert answer.status == Status.FENCED
        assert not served.shelf.storage.inventory.ledgers

    serve(world, scenario, meta, admit_raw_adds=True)


@pytest.mark.parametrize("kind", DigestType)
def test_raw_add_to_an_id_without_ledger_is_refused(world: SimWorld, meta: Metadata, kind: DigestType) -> None:
    """Ids count up, and readers present no key. Packets stored here under the next ledger's id would be read as its
    entries, and their last-add-confirmed trusted. Nor may a writer of Apache's get the answer that entries of a deleted
    ledger are stored."""

    async def scenario(served: Served, peer: Peer) -> None:
        body = EntryDigest(kind).packet(LedgerId(ABSENT), EntryId(1), EntryId(1 << 40), 5, b"hello")
        for key in (NO_KEY, KEY):
            answer = await peer.ask(wire.encode_add(1, ABSENT, 1, key, body))
            assert answer.status != Status.OK
        meta.known[ABSENT] = metadata(ABSENT)
        answer = await peer.ask(wire.encode_read(2, ABSENT, 1))
        assert (answer.status, answer.max_lac) == (Status.NO_LEDGER, None)

    serve(world, scenario, meta, admit_raw_adds=True)


def test_metadata_answers_for_raw_adds_are_trusted_briefly(
    world: SimWorld, meta: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_adds, "BELIEVED_MAX", 4)
    many = range(100, 120)
    meta.known |= {each: metadata(each, state=LedgerState.CLOSED) for each in (*many, EMPTY)}

    async def scenario(served: Served, peer: Peer) -> None:
        for each in many:
            assert await add(peer, each) is Status.OK
        assert len(served.shelf.storage.raw._confirmed_at) <= 4
        assert await add(peer, EMPTY) is Status.OK
        meta.known[EMPTY] = None
        assert await add(peer, EMPTY, 1) is Status.OK, "it was deleted a moment ago"
        await pause(raw_adds.BELIEVED_S)
        assert await add(peer, EMPTY, 2) is not Status.OK

    serve(world, scenario, meta, admit_raw_adds=True)


def test_fence_ends_raw_adds_and_outlives_them(world: SimWorld, meta: Metadata) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert await add(peer, EMPTY) is Status.OK
        assert (await peer.ask(wire.encode_read(2, EMPTY, 0, fence_key=NO_KEY))).status == Status.OK
        assert await add(peer, EMPTY, 1) is not Status.OK
        meta.known[EMPTY] = None
        shelf = served.shelf
        assert await Reclaimer(shelf.env, served.config, shelf.storage, meta).drop_deleted() == [EMPTY]
        assert await add(peer, EMPTY, 2) is not Status.OK
        assert not shelf.storage.inventory.ledgers

    serve(world, scenario, meta, admit_raw_adds=True)


def test_raw_entries_survive_a_restart_and_are_dropped_with_their_ledger(world: SimWorld, meta: Metadata) -> None:
    async def add_to(shelf: Shelf, entry: int) -> Status:
        answered: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        shelf.storage.raw.add(EMPTY, entry, raw(EMPTY, entry), NO_KEY, done=answered.set_result)
        return await answered

    async def life(entry: int) -> None:
        config = tiny(admit_raw_adds=True)
        shelf = await Shelf(world.env("b1"), config, meta).start()
        reclaimer = Reclaimer(shelf.env, config, shelf.storage, meta)
        assert await add_to(shelf, entry) is Status.OK
        assert await reclaimer.drop_deleted() == []
        for each in range(entry + 1):
            status, body, _ = await shelf.read(EMPTY, each)
            assert (status, body) == (Status.OK, raw(EMPTY, each))
        if entry:
            meta.known[EMPTY] = None
            assert await reclaimer.drop_deleted() == [EMPTY]

    for entry in range(2):
        run(world, life(entry), "b1")
        crash(world, "b1")
