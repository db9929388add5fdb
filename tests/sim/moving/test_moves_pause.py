"""A long pause does not hold the source's log forever, and costs no key."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.partition.moves import import_driver
from kvstore.partition.state import commands
from kvstore.ring import KeyHash, Pace, steps
from kvstore.types import PartitionId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.sim.moving.moves import Users, World, at_each_step, each_hash, first_range, keys_in, play
from tests.sim.moving.moves_accidents import Accident, asker
from tests.sim.moving.test_moves import TWO

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
P1 = PartitionId("p1")
SLOW = 200_000


@each_hash
def test_long_pause_releases_log_of_source_and_move_ends_after_resume(
    hash: KeyHash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_driver, "HELD_S", 2.0)
    accident = Accident("after copy")
    held: list[bool] = []

    async def pause(world: World, users: Users) -> None:
        pins = Pins(world.store, LedgerLists(world.store))

        def strike() -> None:
            paused = world.change(lambda ring: steps.set_pace(ring, Pace(paused=True, bytes_per_s=SLOW)))
            world.cluster.spawn(paused, name="pause")

        async def is_held() -> bool:
            return await pins.oldest(P1, 0) is not None

        accident.strike = strike
        ask, keys = asker(world.cluster.nodes[0]), keys_in(SPAN, 60, b"m")
        for key in keys:
            await ask(commands.Put(key, bytes(20_000)), None)
        await world.change(lambda ring: steps.set_pace(ring, Pace(bytes_per_s=SLOW)))
        await world.shift(SPAN, "p2")
        deadline = asyncio.get_running_loop().time() + 20.0
        while not accident.has_struck or await is_held():
            assert asyncio.get_running_loop().time() < deadline, "the log is still held"
            held.append(await is_held())
            await asyncio.sleep(0.2)
        assert any(held), "the log was held while the move was slow"
        assert (await world.read_ring()).moves
        await world.change(lambda ring: steps.set_pace(ring, Pace()))
        await world.moved()
        assert world.ring.owner_of(SPAN.first) == "p2"
        for key in keys:
            assert await ask(commands.Meta(key), None) is not None

    with at_each_step(accident.reached):
        play(9, pause, TWO, users=2, hash=hash)
