"""Retiring a partition while readers of its feed arrive."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.ring.replicas import drain
from kvstore.server.placement import steward as module
from kvstore.server.placement.retirement import partitions_kept
from kvstore.types import LedgerId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.ring.rings import new_ring
from tests.server.placement.stewards import N1, N2, N3, N4, P1, P2, P3, World, looks, remove_log
from tests.server.placement.test_steward import log_of, retire
from tests.waiting import PATIENCE_S, wait_until


# docs/protocol.md H5, G14
async def test_pin_granted_during_retirement_holds_the_log(world: World) -> None:
    await log_of(world, P1, 1)
    await retire(world)
    pins = Pins(world.store, LedgerLists(world.store))
    get = world.store.get

    async def and_a_reader_pins(path: str) -> object:
        try:
            return await get(path)
        except NoSuchNode:
            if path == paths.kept_log(P1):  # the pins have been read, and the list is about to be emptied
                world.store.get = get  # type: ignore[method-assign]
                await pins.hold(P1, "feed-reader", LedgerId(1), deadline_ms=1_000)
            raise

    world.store.get = and_a_reader_pins  # type: ignore[assignment, method-assign]
    assert not await remove_log(world.store, P1, now_ms=0)
    assert await partitions_kept(world.store) == [P1]
    assert await pins.names(P1) == {"feed-reader"}
    assert not await remove_log(world.store, P1, now_ms=999)
    assert await remove_log(world.store, P1, now_ms=1_001)
    assert await pins.names(P1) == set()


def counting(world: World, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the reads of each path."""
    read: Counter[str] = Counter()
    get = world.store.get

    async def counted(path: str) -> object:
        read[path] += 1
        return await get(path)

    monkeypatch.setattr(world.store, "get", counted)
    return read


async def test_held_partitions_cause_no_ring_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for partition in (P1, P2):
        await log_of(world, partition, int(partition[1:]))
        await Pins(world.store, LedgerLists(world.store)).hold(
            partition, "reader", LedgerId(int(partition[1:])), deadline_ms=1 << 60
        )
    world.ring = new_ring([P1, P2, P3], dict.fromkeys((N1, N2, N3), ""), 3)
    await retire(world, P1, P2)
    read = counting(world, monkeypatch)
    await looks(world.steward())
    assert {P1, P2} < set(world.ring.partitions)
    assert read[paths.RING] == 0


async def test_ledgers_are_read_once_for_all_retired_partitions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ring = new_ring([P1, P2, P3], dict.fromkeys((N1, N2, N3), ""), 3)
    for number in range(1, 10):
        await log_of(world, (P1, P2, P3)[number % 3], number, listed=False)
    await retire(world, P1, P2)
    read = counting(world, monkeypatch)
    await looks(world.steward())
    assert set(world.ring.partitions) == {P3}
    assert await LedgerStore(world.store).list_ids() == [2, 5, 8]
    assert [read[paths.ledger(LedgerId(number))] for number in range(1, 10)] == [1] * 9


async def test_replicas_are_recreated_during_ledger_search(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await retire(world)
    is_looking = asyncio.Event()

    async def for_ever(*_: object) -> None:
        is_looking.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(module, "ledgers_made_for", for_ever)
    world.steward()
    await asyncio.wait_for(is_looking.wait(), PATIENCE_S)
    world.ring = drain(world.ring, N1)

    async def has_begun() -> bool:
        return world.ring.partitions[P2].replacing == ((N4, N1),)

    await wait_until(has_begun, what="a replica of the drained server is made anew")
