"""A move releases its pins on the source's log, whatever happens to the metadata store at that moment."""

from __future__ import annotations

import asyncio
from contextvars import Context
from dataclasses import replace

import pytest

from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, at_each_step, hash_for, play
from tests.sim.moving.moves_accidents import Accident
from tests.sim.moving.test_moves import COUNTERS, KEYS, ON_THE_WAY, SPAN, TWO

pytestmark = pytest.mark.sim

AWAY_S = 4.0
"""Seconds: longer than a move waits for the release of a pin, shorter than a session timeout."""
KNOBS = replace(TWO, session_s=10.0)


async def pins(world: World) -> list[str]:
    try:
        return await world.store.children(paths.partition_pins(PartitionId("p1")))
    except NoSuchNode:
        return []


@pytest.mark.parametrize("step", [each for each in ON_THE_WAY if each in ("before begin", "after begin", "after flip")])
def test_no_pin_is_left_after_metadata_outage(step: str) -> None:
    accident = Accident(step)

    async def without_metadata(world: World, users: Users) -> None:
        metadata, names = world.cluster.metadata, [node.name for node in world.cluster.nodes]

        def come_back() -> None:
            for name in names:
                metadata.mend(name)

        def go_away() -> None:
            for name in names:
                metadata.cut(name, silently=False)
            world.cluster.world.loop.call_later(AWAY_S, come_back, context=Context())

        accident.strike = go_away
        await world.shift(SPAN, "p2")
        await world.moved()
        assert accident.has_struck
        await asyncio.sleep(3.0)
        assert await pins(world) == []

    with at_each_step(accident.reached):
        play(5, without_metadata, KNOBS, users=2, keys=KEYS, counters=COUNTERS, hash=hash_for(len(step)))
