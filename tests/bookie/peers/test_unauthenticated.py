"""An unauthenticated peer on a bookie's port: a peer without the ledger's password changes nothing, in both versions of
the protocol, whatever the bookie knows of the ledger (docs/protocol.md, B13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore.proto import bookkeeper as wire
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import master_key
from kvstore.types import LedgerState
from tests.bookie.peer import Peer, Served, serve
from tests.bookie.peers.test_version_two import ADD, FENCE, RECOVERY, ask, frame, number, read
from tests.bookie.support import KEY, ME, Metadata, lac_packet, metadata, packet
from tests.sim.world.env import SimWorld

L = 7
PASSWORD = b"what the cluster's secret gives"
RIGHT = master_key(PASSWORD)
BATCH = 7
NAMED = wire.bookie_context(ME)
OF_VERSION_TWO = {102: Status.UNAUTHORIZED, 104: Status.FENCED, 101: Status.UNKNOWN_LEDGER_STATE}

Prepare = Callable[[Served], None]


def secured(state: LedgerState = LedgerState.OPEN) -> Metadata:
    meta = Metadata()
    meta.known = {L: replace(metadata(L, state=state), password=PASSWORD)}
    return meta


async def attack(served: Served, key: bytes) -> set[Status]:
    """Return the answers to a peer with that key, on a connection for each version."""
    peer, second = await served.connect(), await served.connect()
    told = {
        Status((await peer.ask(request)).status)
        for request in (
            wire.encode_add(1, L, 1, key, packet(L, 1)),
            wire.encode_add(2, L, 0, key, packet(L, 0, b"forged"), recovery=True),
            wire.encode_read(3, L, 0, fence_key=key),
            wire.encode_read(4, L, wire.LAST_ENTRY, fence_key=key, priority=100),
            wire.encode_write_lac(5, L, 99, key, lac_packet(L, 99)),
        )
    }
    for request in (
        frame(ADD, 0, key + packet(L, 1)),
        frame(ADD, RECOVERY, key + packet(L, 0, b"forged")),
        read(0, flags=FENCE, key=key),
    ):
        code, _ = await ask(second, request)
        told.add(OF_VERSION_TWO[code])
    return told


def traces(served: Served) -> object:
    """Return everything that a request could have changed."""
    storage = served.shelf.storage
    found = storage.inventory.ledgers.get(L)
    of_ledger = found and (found.key, found.is_fenced, found.is_admitted, found.lac, found.explicit_lac)
    runs = found and found.index.runs()
    return of_ledger, runs, sorted(storage.inventory.ledgers), storage.journal.open_group.end, storage.statistics.fences


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED])
@pytest.mark.parametrize("key", [KEY, b"x" * 20])
def test_peer_without_key_cannot_change_an_unknown_ledger(world: SimWorld, state: LedgerState, key: bytes) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        before = traces(served)
        assert await attack(served, key) == {Status.UNAUTHORIZED}
        assert traces(served) == before
        fenced = await peer.ask(wire.encode_read(1, L, 0, fence_key=RIGHT, context=NAMED))
        assert fenced.status in (Status.NO_ENTRY, Status.NO_LEDGER), "a recovery has the key"

    serve(world, scenario, secured(state))


@pytest.mark.parametrize("key", [KEY, b"x" * 20])
def test_peer_without_key_cannot_change_a_ledger_being_written(world: SimWorld, key: bytes) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert (await peer.ask(wire.encode_add(1, L, 0, RIGHT, packet(L, 0)))).status == Status.OK
        await served.shelf.storage.synced()
        served.shelf.storage.journal.certify()
        before = traces(served)
        assert await attack(served, key) == {Status.UNAUTHORIZED}
        assert traces(served) == before
        assert (await peer.ask(wire.encode_add(2, L, 1, RIGHT, packet(L, 1)))).status == Status.OK
        assert await served.shelf.payload(L, 0) == b"hello"

    serve(world, scenario, secured())


def test_peer_without_key_cannot_change_a_ledger_with_a_lost_key(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        served.shelf.storage.inventory.known(L)
        before = traces(served)
        assert await attack(served, KEY) == {Status.UNAUTHORIZED}
        assert traces(served) == before
        assert (await peer.ask(wire.encode_add(1, L, 0, RIGHT, packet(L, 0), recovery=True))).status == Status.OK

    serve(world, scenario, secured())


def test_peer_sets_nothing_while_an_unknown_key_cannot_be_checked(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        before = traces(served)
        served.meta.is_away = True
        assert await attack(served, KEY) == {Status.UNKNOWN_LEDGER_STATE}
        assert await attack(served, RIGHT) == {Status.UNKNOWN_LEDGER_STATE}
        assert traces(served) == before
        served.meta.is_away = False
        assert (await peer.ask(wire.encode_read(1, L, 0, fence_key=RIGHT, context=NAMED))).status == Status.NO_ENTRY

    serve(world, scenario, secured())


def test_known_ledger_is_fenced_while_the_metadata_store_is_away(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        assert (await peer.ask(wire.encode_write_lac(1, L, -1, RIGHT, lac_packet(L, -1)))).status == Status.OK
        served.meta.is_away = True
        assert (await peer.ask(wire.encode_read(2, L, 0, fence_key=RIGHT, context=NAMED))).status == Status.NO_ENTRY
        assert (await peer.ask(wire.encode_add(3, L, 0, RIGHT, packet(L, 0), recovery=True))).status == Status.OK
        assert (await peer.ask(wire.encode_add(4, L, 1, RIGHT, packet(L, 1)))).status == Status.FENCED
        assert (await peer.ask(wire.encode_read(5, L, 0, fence_key=KEY))).status == Status.UNAUTHORIZED

    serve(world, scenario, secured())


def test_peer_without_key_cannot_spoil_a_future_ledger(world: SimWorld) -> None:
    meta = Metadata()
    meta.known = {L: None}

    async def scenario(served: Served, peer: Peer) -> None:
        before = traces(served)
        told = await attack(served, KEY)
        assert told <= {Status.UNKNOWN_LEDGER_STATE, Status.FENCED}
        assert traces(served) == before
        served.meta.known = secured().known
        assert (await peer.ask(wire.encode_add(1, L, 0, RIGHT, packet(L, 0)))).status == Status.OK

    serve(world, scenario, meta)


def test_batched_read_of_version_two_fences_only_with_the_key(world: SimWorld) -> None:
    async def scenario(served: Served, peer: Peer) -> None:
        before = traces(served)
        rest = number(L) + number(0) + number(99) + number(5, 4) + number(1000)
        peer.send(frame(BATCH, FENCE, rest + KEY))
        await peer.answers(1)
        assert traces(served) == before

    serve(world, scenario, secured())


def test_ledger_without_password_has_the_key_of_the_empty_one(world: SimWorld) -> None:
    async def scenario(_: Served, peer: Peer) -> None:
        assert (await peer.ask(wire.encode_add(1, L, 0, KEY, packet(L, 0), recovery=True))).status == Status.OK
        assert (await peer.ask(wire.encode_read(2, L, 0, fence_key=KEY))).status == Status.OK

    serve(world, scenario)
