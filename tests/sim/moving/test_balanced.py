"""The balancer moves leads, replicas and ranges while faults strike: every key stays, every token has one owner, and no
machine has two replicas of a partition."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

import pytest

from kvstore.ring import MURMUR3, SLOTS_HASH, KeyHash
from kvstore.ring import replicas as ring_replicas
from kvstore.server.balance import judge, leads, ranges
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.step import Goal, Step
from kvstore.server.balance_config import BalanceConfig, BalanceMode
from kvstore.server.placement import balancing
from tests.sim.cluster import RuleBroken
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, play
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import MACHINES, Knobs

pytestmark = [pytest.mark.sim, pytest.mark.slow]

AUTO = BalanceConfig(mode=BalanceMode.AUTO, settle_s=1.0, moves_per_hour=240)
KNOBS = Knobs(
    nodes=5,
    machines=MACHINES,
    partitions=4,
    balance=AUTO,
    faults=("kill_leader", "hand_over", "pause", "session_expiry", "cut_a_link"),
    pace_s=8.0,
    chaos_s=24.0,
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Goal]:
    """Count the steps that are made. A simulated load is small, so less work matters."""
    monkeypatch.setattr(logging.getLogger("kvstore"), "level", logging.CRITICAL + 1)
    for module in (judge, leads):
        monkeypatch.setattr(module, "WORK_MIN", 1.0)
    monkeypatch.setattr(judge, "HIGH", 1.05)
    monkeypatch.setattr(ranges, "KEYS_MIN", 1)
    steps: Counter[Goal] = Counter()
    make = Balancer._make

    async def counting(self: Balancer, step: Step, ring_version: int, now_ms: int) -> None:
        await make(self, step, ring_version, now_ms)
        steps[step.goal] += 1

    monkeypatch.setattr(Balancer, "_make", counting)
    return steps


async def balance_in_trouble(world: World, users: Users) -> None:
    """Let faults strike while the balancer works, and then end the balancer, so that the moves come to an end."""
    knobs = world.cluster.knobs
    await Chaos(world.cluster, world.cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s).run(knobs.chaos_s)
    for node in world.cluster.nodes:
        if node.served is not None:
            await node.served.balancer.close()


async def balance_in_peace(world: World, users: Users) -> None:
    await asyncio.sleep(world.cluster.knobs.chaos_s)


@pytest.mark.parametrize(("seed", "hash"), [(1, SLOTS_HASH), (2, MURMUR3)])
def test_balancer_under_faults_loses_nothing(seed: int, hash: KeyHash, made: Counter[Goal]) -> None:
    knobs = replace(KNOBS, hash=hash, partition=replace(KNOBS.partition, lead_back_s=1.0))
    play(seed, balance_in_trouble, knobs, users=4, pause_s=LONG_PAUSE_S)
    assert made, "no step was made"


# docs/protocol.md H15
def test_balancer_that_ignores_machines_is_noticed(made: Counter[Goal], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (balancing, ring_replicas):
        monkeypatch.setattr(module, "may_replace", lambda newcomer, _leaving, replicas: newcomer not in replicas)
    with pytest.raises(RuleBroken, match="H15 a machine has one replica of a partition"):
        play(1, balance_in_peace, KNOBS, users=4, pause_s=LONG_PAUSE_S)
