"""What a server still has of a partition whose replica went elsewhere while the server was down."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.types import PartitionId
from tests.sim.moves import Users, World, play
from tests.sim.test_moves import TWO

pytestmark = pytest.mark.sim

P1, P2 = PartitionId("p1"), PartitionId("p2")


def test_a_server_that_returns_drops_what_is_not_assigned_to_it_any_more_and_nothing_else() -> None:
    async def leave_while_one_is_down(world: World, users: Users) -> None:
        away = next(node for node in world.cluster.nodes if not {P1, P2} & set(node.leads))
        away.crash()
        strange = PartitionId("of another cluster")
        away.engines.open(strange)
        await world.leave("p2")
        await world.moved()
        await world.retired()
        assert away.engines.find() == [strange, P1, P2]
        away.start()
        deadline = asyncio.get_running_loop().time() + 10.0
        while P2 in away.engines.find():
            assert asyncio.get_running_loop().time() < deadline, "it is still there"
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert away.engines.find() == [strange, P1]

    play(2, leave_while_one_is_down, TWO, users=1)
