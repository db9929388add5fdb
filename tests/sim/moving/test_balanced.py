"""The balancer moves leads, replicas and ranges while faults strike: nothing is lost, no read lies, and every partition
serves again."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest

from kvstore.server.balance import judge, leads, ranges
from kvstore.server.balance.balancer import Balancer
from kvstore.server.balance.config import BalanceConfig, BalanceMode
from kvstore.server.balance.step import Goal, Step
from tests.sim.run import run
from tests.sim.strikes.knobs import Knobs
from tests.sim.workloads import Load

pytestmark = [pytest.mark.sim, pytest.mark.slow]

AUTO = BalanceConfig(mode=BalanceMode.AUTO, settle_s=1.0, moves_per_hour=240)
KNOBS = Knobs(
    nodes=4,
    partitions=4,
    balance=AUTO,
    load=Load(registers=2, counters=1, banks=0, readers=1, pause_s=0.1),
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
    monkeypatch.setattr(ranges, "KEYS_MIN", 1)
    steps: Counter[Goal] = Counter()
    make = Balancer._make

    async def counting(self: Balancer, step: Step, ring_version: int, now_ms: int) -> None:
        await make(self, step, ring_version, now_ms)
        steps[step.goal] += 1

    monkeypatch.setattr(Balancer, "_make", counting)
    return steps


def test_balancer_under_faults_loses_nothing(made: Counter[Goal]) -> None:
    run(1, replace(KNOBS, partition=replace(KNOBS.partition, lead_back_s=1.0)))
    assert made, "no step was made"
