"""The figures of the benchmark under an attack."""

from __future__ import annotations

import pytest

from loadtest.bench.attacked import GETS, Figures, goal_ms, p99_ms
from tests.cluster.access.attack import Repeated


def calls(*took_ms: float, failed: Exception | None = None) -> Repeated:
    made = Repeated(lambda: None, 1.0)
    made.took_s += [each / 1000 for each in took_ms]
    made.failed += [] if failed is None else [failed]
    return made


def test_p99_is_the_latency_that_one_call_in_a_hundred_exceeds() -> None:
    assert p99_ms([number / 1000 for number in range(200)]) == 198.0
    with pytest.raises(ValueError, match="no call was done"):
        p99_ms([])


@pytest.mark.parametrize(("calm_ms", "ready", "goal"), [(5.0, 0.2, 20.0), (5.0, 1.4, 24.0), (8.0, 3.0, 46.0)])
def test_goal_grows_with_calm_latency_and_ready_processes(calm_ms: float, ready: float, goal: float) -> None:
    assert goal_ms(calm_ms, ready) == goal


def test_figure_is_the_median_of_the_rounds_and_failures_are_named() -> None:
    figures = Figures()
    for calm, attacked in ((4.0, 9.0), (90.0, 7.0), (5.0, 300.0)):
        figures.add(GETS, calls(calm), is_attacked=False)
        figures.add(GETS, calls(attacked, failed=OSError("gone")), is_attacked=True)
    assert (figures.usual_ms(GETS, is_attacked=False), figures.usual_ms(GETS, is_attacked=True)) == (5.0, 9.0)
    assert figures.rows() == [{"call": "GET", "calls": 6, "calm_p99_ms": 5.0, "attacked_p99_ms": 9.0}]
    assert figures.failed == ["GET: OSError: gone"] * 3
