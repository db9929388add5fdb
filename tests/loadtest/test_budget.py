"""The cost of operations in calls of real nodes: at most the committed budget (loadtest/budget.py)."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from loadtest.budget import BUDGET, IDLE_CALLS_PER_S, Budget, Cost, Load, running_budget

pytestmark = pytest.mark.cluster

ATTEMPTS_MAX = 6
"""A full machine does more background work during each operation."""


@pytest.fixture(scope="module")
def budget() -> Iterator[Budget]:
    with running_budget() as found:
        yield found


IDLE_S = 10.0


def test_idle_node_makes_few_calls(budget: Budget) -> None:
    """The minimum of some counts for each node: a new cluster becomes idle, and each node checks many unchanged
    things."""
    least: dict[str, float] = {}
    for _ in range(ATTEMPTS_MAX):
        for each in budget.idle(IDLE_S):
            calls_per_s = sum(each.calls_per_s.values())
            assert calls_per_s > 100, "nothing was counted"
            least[each.node] = min(calls_per_s, least.get(each.node, inf))
        if max(least.values()) <= IDLE_CALLS_PER_S:
            return
    raise AssertionError(f"more calls a second than an idle node may take: {least}")


@pytest.mark.parametrize("load", [load for load in BUDGET if load.connections == 1], ids=lambda load: load.name)
def test_operation_takes_no_more_calls_than_its_budget(budget: Budget, load: Load) -> None:
    """The minimum of some counts for each role: background work varies over time. `make budget` also judges loads of
    many connections. On a machine that is full of other tests they have smaller reads and entries, and more calls."""
    least: dict[str, Cost] = {}
    for _ in range(ATTEMPTS_MAX):
        for cost in budget.measure(load):
            least[cost.role] = min(cost, least.get(cost.role, cost), key=lambda each: each.calls_per_operation)
        assert least["leader"].calls_per_operation > 1, "nothing was counted"
        if all(cost.is_within for cost in least.values()):
            return
    found = {role: round(cost.calls_per_operation, 1) for role, cost in least.items()}
    raise AssertionError(f"more calls than {load.budget}: {found}")
