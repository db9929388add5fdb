"""A copy of a damaged replica's state is not a second vote for it (docs/protocol.md, P35)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.autorecovery.config import AutorecoveryConfig
from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.stories.stories_of_damage import busy, declare, is_well
from tests.sim.strikes.damage import damage

pytestmark = pytest.mark.sim
ROLLS = replace(
    knobs(lead_back_s=100.0, check_every=100, roll_entries=10),
    autorecovery=AutorecoveryConfig(auditor=False, worker=False),  # tests states, not copies of entries
)


async def copied(stage: Stage, donor: Node, newcomer: Node) -> None:
    """The new replica has lost its state, and the log is trimmed. It reaches only the donor and takes the donor's
    state."""
    network = stage.world.network
    newcomer.crash()
    newcomer.engines.wipe()
    for other in stage.others(newcomer):
        if other is not donor:
            network.cut(newcomer.name, other.name)
    newcomer.start()
    await stage.until(lambda: (replica := newcomer.replica(P)) is not None and replica._tail.installs == 1)
    network.heal(newcomer.name)
    assert newcomer.replica(P).state.crc == donor.replica(P).state.crc, "it took the state of another replica"  # type: ignore[union-attr]


async def trimmed(stage: Stage) -> None:
    replica = stage.leader.replica(P)
    assert replica is not None
    for _ in range(60):  # spaced checks roll the log and trim it
        await busy(stage, 12)
        await asyncio.sleep(0.5)
        if replica._upkeep.trimmed:
            return
    raise AssertionError("the log is not trimmed")


@pytest.mark.parametrize("seed", range(1, 5))
def test_damaged_replica_and_its_copy_do_not_outvote_healthy_one(seed: int) -> None:
    async def story(stage: Stage) -> None:
        await trimmed(stage)
        bad = stage.leader
        good, newcomer = stage.others(bad)
        damage(bad, P)
        await copied(stage, bad, newcomer)
        well = good.replica(P)
        for _ in range(100):
            await stage.put(good, b"other")
        await stage.until(lambda: not any(map(is_well, stage.cluster.nodes)))
        await asyncio.sleep(20.0)
        assert good.replica(P) is well, "it was rebuilt from a damaged copy"
        assert stage.cluster.leader(P) is None, "it is unknown which of the two is right"
        await stage.cluster.spawn(declare(good), name="operator")
        await stage.until(lambda: all(map(is_well, stage.cluster.nodes)))
        assert (await stage.put_until_done(good)).status is Status.OK

    play(story, ROLLS, seed)


def test_copy_confirmed_by_third_replica_counts_as_its_own_vote() -> None:
    async def story(stage: Stage) -> None:
        await trimmed(stage)
        donor = stage.leader
        third, newcomer = stage.others(donor)
        await copied(stage, donor, newcomer)
        await busy(stage, 110)
        state = newcomer.replica(P).state  # type: ignore[union-attr]
        await stage.until(lambda: not state.origins)
        damaged = third.replica(P)
        damage(third, P)
        await busy(stage, 110)
        await stage.until(lambda: third.replica(P) not in (damaged, None))
        await stage.until(lambda: all(map(is_well, stage.cluster.nodes)))

    play(story, ROLLS)
