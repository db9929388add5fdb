"""Whom a bookie asks before it stores a ledger's first entry, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.support import Shelf, in_world, metadata
from tests.sim.world.env import SimWorld

L = 7


@pytest.fixture
def world() -> Iterator[SimWorld]:
    with SimWorld(1) as world:
        yield world


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_world
async def test_first_add_does_not_wait_after_a_message_of_its_writer(world: SimWorld) -> None:
    shelf = await Shelf(world.node("b1").env).start()
    assert await shelf.write_lac(L, -1) is Status.OK
    await settled()
    assert shelf.meta.asked == [L]
    shelf.meta.is_away = True
    assert await shelf.add(L, 0) is Status.OK
    assert shelf.meta.asked == [L]


@in_world
async def test_message_of_a_ledgers_writer_alone_admits_nothing(world: SimWorld) -> None:
    shelf = await Shelf(world.node("b1").env).start()
    shelf.meta.known[L] = replace(metadata(L), state=LedgerState.IN_RECOVERY)
    assert await shelf.write_lac(L, -1) is Status.OK
    await settled()
    assert await shelf.add(L, 0) is Status.FENCED
    shelf.meta.known.pop(L)
    shelf.meta.is_away = True
    await shelf.write_lac(L + 1, -1)
    await settled()
    assert await shelf.add(L + 1, 0) is not Status.OK, "it could not ask, then or now"


@in_world
async def test_fence_during_a_metadata_read_holds(world: SimWorld) -> None:
    shelf = await Shelf(world.node("b1").env).start()
    await shelf.add(L, 5, recovery=True)  # so its key is known
    shelf.meta.gate = asyncio.Event()
    await shelf.write_lac(L, -1)
    await shelf.status(L, fence=True)
    shelf.meta.gate.set()
    await settled()
    assert await shelf.add(L, 0) is Status.FENCED
