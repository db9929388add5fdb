"""While the metadata store is away, no range changes hands: the owner of a range continues to answer for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.partition.moves import catch_up
from kvstore.partition.state import commands
from kvstore.types import PartitionId
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Status
from tests.sim.moving.moves import Users, World, at_each_step, hash_for, play
from tests.sim.moving.moves_accidents import Accident
from tests.sim.moving.test_moves import COUNTERS, KEYS, SPAN, TWO

pytestmark = pytest.mark.sim

AWAY_S = 10.0
ANSWERED_S_MAX = 5.0
KNOBS = replace(TWO, session_s=60.0)


# docs/protocol.md M10
@pytest.mark.parametrize("from_all", [True, False], ids=("all", "the target's leader"))
def test_range_stays_in_place_while_ring_cannot_be_changed(from_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has followed for a while, far behind: to read the source's log it does not need the store any more."""
    accident = Accident("before follow", nth=5)
    close = catch_up.CLOSE_ENTRIES
    monkeypatch.setattr(catch_up, "CLOSE_ENTRIES", 0)

    async def without_metadata(world: World, users: Users) -> None:
        metadata = world.cluster.metadata
        away = asyncio.Event()
        names: list[str] = []

        def go_away() -> None:
            leader = world.leader_of(PartitionId("p2"))
            assert leader is not None
            names.extend([node.name for node in world.cluster.nodes] if from_all else [leader.name])
            for name in names:
                metadata.cut(name, silently=False)
            monkeypatch.setattr(catch_up, "CLOSE_ENTRIES", close)
            away.set()

        accident.strike = go_away
        await world.shift(SPAN, "p2")
        await away.wait()
        await asyncio.sleep(AWAY_S)
        random = world.cluster.world.fork("while it is away")
        worker = Worker(world.cluster, "away", random, Identity(random))
        for key in KEYS:
            began = asyncio.get_running_loop().time()
            done = await worker.do(commands.Get(key))
            assert done.status is Status.OK, done
            assert asyncio.get_running_loop().time() - began < ANSWERED_S_MAX
        assert "after freeze" not in accident.seen
        for name in names:
            metadata.mend(name)
        await world.moved()

    with at_each_step(accident.reached):
        play(5, without_metadata, KNOBS, users=2, keys=KEYS, counters=COUNTERS, hash=hash_for(from_all))
