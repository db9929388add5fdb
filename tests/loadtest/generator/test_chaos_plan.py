"""A chaos plan never stops two nodes at once, and leaves time to see the effect."""

from __future__ import annotations

import pytest

from kvstore.loadtest.generator.chaos_plan import ADD_PARTITION, CALM_S, KILL, SNAPSHOT, START, plan

NODES = ["n1", "n2", "n3"]


@pytest.mark.parametrize("seconds", [19.0, 30.0, 120.0, 600.0])
@pytest.mark.parametrize("seed", range(5))
def test_one_node_is_down_at_a_time_and_all_are_up_at_the_end(seconds: float, seed: int) -> None:
    down: list[str] = []
    for fault in plan(NODES, seconds, 2.0, seed):
        assert 2.0 < fault.at_s <= seconds - CALM_S
        if fault.what == KILL:
            assert down == []
            down.append(fault.node)
        elif fault.what == START:
            assert down.pop() == fault.node
    assert down == []


def test_ten_minutes_kill_every_node_and_add_a_partition() -> None:
    faults = plan(NODES, 600.0, 5.0, 1)
    assert {fault.node for fault in faults if fault.what == KILL} == set(NODES)
    order = [fault.what for fault in faults if fault.what in (ADD_PARTITION, SNAPSHOT)]
    assert order == [ADD_PARTITION, SNAPSHOT]


def test_changes_do_not_begin_with_a_kill() -> None:
    for seconds in (90.0, 120.0, 300.0, 600.0):
        faults = plan(NODES, seconds, 5.0, 1)
        kills = [fault.at_s for fault in faults if fault.what in (KILL, START)]
        changes = [fault.at_s for fault in faults if fault.what in (ADD_PARTITION, SNAPSHOT)]
        assert len(changes) == 2
        assert min(abs(a - b) for a in kills for b in changes) > 5


@pytest.mark.parametrize("seconds", [60.0, 70.0, 80.0, 85.0, 90.0, 150.0])
def test_there_is_a_kill_between_the_changes_or_no_change(seconds: float) -> None:
    order = [fault.what for fault in plan(NODES, seconds, 3.0, 1) if fault.what != START]
    assert order == [KILL] * len(order) or order[order.index(ADD_PARTITION) + 1 : order.index(SNAPSHOT)] == [KILL]


def test_one_seed_gives_one_plan() -> None:
    assert plan(NODES, 600.0, 5.0, 1) == plan(list(reversed(NODES)), 600.0, 5.0, 1)
    assert len({tuple(plan(NODES, 600.0, 5.0, seed)) for seed in range(10)}) > 1


def test_run_too_short_for_a_kill_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 18 s"):
        plan(NODES, 17.0, 2.0, 1)
