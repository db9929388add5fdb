"""Ranges move while they are read and written: nothing is lost, stale, doubled or resurrected."""

from __future__ import annotations

import pytest

from tests.sim.moves import Users, World, play

pytestmark = pytest.mark.sim


async def join_one(world: World, users: Users) -> None:
    await world.join("p2")
    await world.moved()


@pytest.mark.parametrize("seed", range(3))
def test_a_partition_joins_under_load(seed: int) -> None:
    play(seed, join_one)
