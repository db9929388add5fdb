"""A bookie neither stores nor trusts a packet with a wrong digest (docs/protocol.md, B21)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import DigestType, EntryId, LedgerId
from tests.bits import flipped
from tests.bookie.support import KEY, Shelf, in_world, lac_packet, metadata, packet
from tests.sim.world.env import SimWorld

L = LedgerId(7)


async def opened(world: SimWorld) -> Shelf:
    return await Shelf(world.env("b1")).start()


async def add(shelf: Shelf, entry: int, body: bytes, *, key: bytes = KEY, recovery: bool = False) -> Status:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    shelf.storage.add(L, entry, body, key, recovery=recovery, done=answer.set_result)
    return await answer


def unchecked(kind: DigestType, entry: int) -> bytes:
    return EntryDigest(kind, b"theirs").packet(L, EntryId(entry), EntryId(-1), 7, b"payload")


async def write_lac(shelf: Shelf, body: bytes, key: bytes = KEY) -> Status:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    shelf.storage.write_lac(L, body, key, done=answer.set_result)
    return await answer


@pytest.mark.parametrize("recovery", [False, True])
@in_world
async def test_add_with_any_flipped_bit_is_refused(world: SimWorld, recovery: bool) -> None:
    shelf = await opened(world)
    good = packet(L, 0, b"payload")
    for bit in range(8 * len(good)):
        assert await add(shelf, 0, flipped(good, bit), recovery=recovery) is Status.BAD_REQUEST, f"bit {bit}"
    assert shelf.storage.statistics.refused_digest == 8 * (len(good) - 16), "ledger and entry are compared before"
    assert await shelf.status(L, 0) in (Status.NO_ENTRY, Status.NO_LEDGER)
    assert await add(shelf, 0, good, recovery=recovery) is Status.OK, "the same bookie takes the good one"


@in_world
async def test_flipped_bit_moves_no_lac(world: SimWorld) -> None:
    """Tails would apply entries that a recovery may still drop (L10)."""
    shelf = await opened(world)
    for entry in range(4):
        assert await shelf.add(L, entry, lac=0) is Status.OK
    of_entry, explicit = packet(L, 4, lac=0), lac_packet(L, 0)
    assert await add(shelf, 4, flipped(of_entry, 8 * 23)) is Status.BAD_REQUEST
    assert await write_lac(shelf, flipped(explicit, 8 * 15 + 1)) is Status.BAD_REQUEST
    status, _, lac = await shelf.read(L, 0)
    assert (status, lac) == (Status.OK, 0)
    assert not shelf.poll(L, 0, 50_000).done()
    assert (await shelf.read_lac(L))[1] is None
    assert await write_lac(shelf, explicit) is Status.OK


@pytest.mark.parametrize("kind", [DigestType.CRC32, DigestType.HMAC])
@pytest.mark.parametrize("recovery", [False, True])
@in_world
async def test_other_digests_are_checked_by_the_ledgers_metadata(
    world: SimWorld, kind: DigestType, recovery: bool
) -> None:
    shelf = await opened(world)
    shelf.meta.known[L] = replace(metadata(L), digest=kind, password=b"secret")
    digest, key = EntryDigest(kind, b"secret"), master_key(b"secret")
    for number in range(5):
        entry = EntryId(number)
        good = digest.packet(L, entry, EntryId(-1), 7, b"payload")
        bad = flipped(good, 8 * len(good) - 1)
        assert await add(shelf, entry, bad, key=key, recovery=recovery) is Status.BAD_REQUEST
        assert await add(shelf, entry, good, key=key, recovery=recovery) is Status.OK
    lac = digest.lac_packet(L, EntryId(2))
    assert await write_lac(shelf, flipped(lac, 8 * 15 + 1), key) is Status.BAD_REQUEST
    assert await write_lac(shelf, lac, key) is Status.OK
    assert len(shelf.meta.asked) <= 3, "the digest, and the admission, are asked for once"


@pytest.mark.parametrize("kind", [DigestType.DUMMY, DigestType.HMAC])
@in_world
async def test_uncheckable_packet_is_stored_if_the_key_is_right(world: SimWorld, kind: DigestType) -> None:
    """A packet without digest, or with one whose password the metadata does not contain, of a ledger whose key is on
    disk here (docs/protocol.md, B13): readers check it."""
    shelf = await opened(world)
    key = master_key(b"theirs")
    shelf.meta.known[L] = replace(metadata(L), password=b"theirs")
    assert await add(shelf, 0, packet(L, 0), key=key) is Status.OK
    shelf.meta.known[L] = replace(metadata(L), digest=kind)
    assert await add(shelf, 1, unchecked(kind, 1), key=key) is Status.OK
    assert shelf.storage.statistics.refused_digest == 0


@pytest.mark.parametrize("kind", [DigestType.DUMMY, DigestType.HMAC])
@in_world
async def test_uncheckable_packet_of_an_unauthenticated_peer_is_refused(world: SimWorld, kind: DigestType) -> None:
    """A digest that cannot be checked here gives nobody access: the key is checked as always (docs/protocol.md,
    B13)."""
    shelf = await opened(world)
    shelf.meta.known[L] = replace(metadata(L), digest=kind)
    assert await add(shelf, 0, unchecked(kind, 0), key=master_key(b"theirs")) is Status.UNAUTHORIZED
    assert await shelf.status(L, 0) in (Status.NO_ENTRY, Status.NO_LEDGER)
    shelf.meta.known[L] = metadata(L)
    assert await shelf.add(L, 0) is Status.OK, "it has left no key behind that keeps the writer out"


@in_world
async def test_unproven_packet_is_refused_while_the_digest_type_is_unknown(world: SimWorld) -> None:
    shelf = await opened(world)
    assert await shelf.add(L, 0) is Status.OK
    shelf.meta.is_away = True
    assert await shelf.add(L, 1) is Status.OK, "CRC32C needs nobody"
    assert await add(shelf, 2, flipped(packet(L, 2), 300)) is Status.UNKNOWN_LEDGER_STATE
