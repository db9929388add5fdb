"""The balancer moves leads, replicas and ranges while faults strike: every key stays, every token has one owner, and no
machine has two replicas of a partition."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest

from kvstore.ring import MURMUR3, SLOTS_HASH, KeyHash
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.step import Goal, Step
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, play
from tests.sim.run import heal
from tests.sim.strikes.balancing import end_balancing, restless
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import BALANCER, MACHINES, Knobs

pytestmark = [pytest.mark.sim, pytest.mark.slow]

KNOBS = Knobs(
    nodes=5,
    machines=MACHINES,
    partitions=4,
    balance=BALANCER,
    balances_ranges=True,
    faults=("kill_leader", "hand_over", "pause", "session_expiry", "cut_a_link"),
    pace_s=5.0,
    chaos_s=15.0,
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Goal]:
    """Count the steps that are made."""
    monkeypatch.setattr(logging.getLogger("kvstore"), "level", logging.CRITICAL + 1)
    steps: Counter[Goal] = Counter()
    act = Balancer.act

    async def counting(self: Balancer) -> Step | None:
        step = await act(self)
        steps.update(() if step is None else (step.goal,))
        return step

    monkeypatch.setattr(Balancer, "act", counting)
    return steps


async def balance_in_trouble(world: World, users: Users) -> None:
    """Let faults strike while the balancer works, and then end it, so that the moves come to an end."""
    knobs = world.cluster.knobs
    await Chaos(world.cluster, world.cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s).run(knobs.chaos_s)
    heal(world.cluster)
    await end_balancing(world.cluster)


# docs/protocol.md H13
@pytest.mark.parametrize(("seed", "hash", "is_blind"), [(1, SLOTS_HASH, False), (2, MURMUR3, True)])
def test_balancer_under_faults_loses_nothing(seed: int, hash: KeyHash, is_blind: bool, made: Counter[Goal]) -> None:
    partition = replace(KNOBS.partition, lead_back_s=1.0)
    knobs = replace(KNOBS, hash=hash, balances_blindly=is_blind, partition=partition)
    with restless(knobs):
        play(seed, balance_in_trouble, knobs, users=4, pause_s=LONG_PAUSE_S)
    assert made[Goal.REPLICAS], f"only {made} were made"
    assert made[Goal.LOAD] + made[Goal.SHARES], f"only {made} were made"
