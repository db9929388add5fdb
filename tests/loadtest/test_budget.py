"""The cost of operations in calls of real nodes: at most the committed budget (loadtest/budget.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.budget import BUDGET, Budget, Load, running_budget

pytestmark = pytest.mark.cluster

ATTEMPTS_MAX = 6
"""A full machine does more background work during each operation."""


@pytest.fixture(scope="module")
def budget() -> Iterator[Budget]:
    with running_budget() as found:
        yield found


IDLE_S = 10.0


def test_idle_node_makes_few_calls(budget: Budget) -> None:
    """The minimum of some counts: a new cluster becomes idle, and each node checks many unchanged things."""
    counted = []
    for _ in range(ATTEMPTS_MAX):
        idle = budget.idle(IDLE_S)
        counted.append({each.node: round(sum(each.calls_per_s.values())) for each in idle})
        assert min(counted[-1].values()) > 100, "nothing was counted"
        if all(each.is_within for each in idle):
            return
    raise AssertionError(f"more calls a second than an idle node may take: {counted}")


@pytest.mark.parametrize("load", [load for load in BUDGET if load.budget], ids=lambda load: load.name)
def test_operation_takes_no_more_calls_than_its_budget(budget: Budget, load: Load) -> None:
    """The minimum of some counts: background work varies over time."""
    counted = []
    for _ in range(ATTEMPTS_MAX):
        costs = budget.measure(load)
        counted.append({cost.role: round(cost.calls_per_operation, 1) for cost in costs})
        assert counted[-1]["leader"] > 1, "nothing was counted"
        if all(cost.is_within for cost in costs):
            return
    raise AssertionError(f"more calls than {load.budget}: {counted}")
