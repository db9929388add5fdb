"""Ranges that move away and come back while a deposed leader does not know of it."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.ring import KeyHash, Pace, steps
from kvstore.ring.moves import MoveState
from kvstore.types import PartitionId
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, each_hash, first_range, keys_in, play
from tests.sim.nodes import Node
from tests.sim.strikes.knobs import Knobs

pytestmark = [pytest.mark.sim, pytest.mark.slow]

P2 = PartitionId("p2")
SPAN = first_range("p1", 2)
KEYS = (*keys_in(SPAN, 8, b"k"), b"k0", b"k1")
COUNTERS = (*keys_in(SPAN, 3, b"c"), b"c0")
AWAKE_S = 3.0
"""Seconds: less than the time after which a leader that reaches no bookie ends on its own."""


async def begun(world: World) -> None:
    """Wait until the target of a move may log its import."""
    while MoveState.COPYING not in [move.state for move in (await world.read_ring()).moves.values()]:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def another_leads(world: World, former: Node) -> None:
    while not any(P2 in node.leads for node in world.cluster.nodes if node is not former):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


# docs/protocol.md M10
@each_hash
def test_deposed_target_that_owned_range_before_does_not_flip_ring(hash: KeyHash) -> None:
    """The range would be routed permanently to a partition that does not own it."""

    async def away_and_back(world: World, users: Users) -> None:
        await world.shift(SPAN, "p2")
        await world.moved()
        former = world.leader_of(P2)
        assert former is not None
        former.pause()
        await another_leads(world, former)
        await world.shift(SPAN, "p1")
        await world.moved()
        await world.change(lambda ring: steps.set_pace(ring, Pace(bytes_per_s=1)))
        await world.shift(SPAN, "p2")
        await begun(world)
        others = [node.name for node in world.cluster.nodes if node is not former]
        world.cluster.network.split([former.name], others)
        former.resume()  # it reaches the metadata store and no bookie
        await asyncio.sleep(AWAKE_S)
        assert [move.state for move in (await world.read_ring()).moves.values()] == [MoveState.COPYING]
        world.cluster.network.heal()
        await world.change(lambda ring: steps.set_pace(ring, Pace()))

    knobs = Knobs(partitions=2, hash=hash)
    play(0, away_and_back, knobs, users=3, keys=KEYS, counters=COUNTERS, pause_s=LONG_PAUSE_S)
