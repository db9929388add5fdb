"""Rates move as the shape says, and the search for the knee ends at it."""

from __future__ import annotations

import pytest

from loadtest.shapes import NAMES, Knee, Limits, Seen, Shape, shape_of


def rates(shape: Shape, *ats: float) -> list[float | None]:
    return [shape.rate(at, None) for at in ats]


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_begins_above_nothing_and_ends_in_time(name: str) -> None:
    shape = shape_of(name, 100.0, 60.0)
    assert (shape.rate(0.0, None) or 0) > 0
    assert shape.rate(60.0, None) is None


def test_steps_are_equal_and_end_at_the_rate() -> None:
    assert rates(shape_of("step", 100, 50), 0, 9, 10, 29, 49) == [20, 20, 40, 60, 100]


def test_a_spike_is_several_times_the_rate_and_goes_away() -> None:
    assert rates(shape_of("spike", 100, 100), 0, 39, 40, 59, 60, 99) == [100, 100, 400, 400, 100, 100]


def test_a_soak_rises_slowly_and_then_stays() -> None:
    assert rates(shape_of("soak", 100, 100), 0, 5, 10, 99) == [10, 50, 100, 100]


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="find-it"):
        shape_of("find-it", 1, 1)


def search(capacity: float, *, start: float = 100.0, seconds: float = 10_000.0) -> Knee:
    """Against a store that carries `capacity`: below it everything is done at once, above it only so much."""
    knee = Knee(start, seconds, Limits(trial_s=10.0))
    at, rate, since = 0.0, knee.rate(0.0, None), 0.0
    while rate is not None:
        at += 1.0
        is_carried = rate <= capacity
        seen = Seen(min(rate, capacity), 5.0 if is_carried else 900.0, 0) if at - since > 4 else None
        following = knee.rate(at, seen)
        if following != rate:
            rate, since = following, at
    return knee


@pytest.mark.parametrize("capacity", [120.0, 500.0, 1_234.0, 9_000.0])
def test_the_search_ends_close_below_the_capacity(capacity: float) -> None:
    knee = search(capacity)
    assert 0.85 * capacity < knee.carried_per_s <= capacity
    assert [trial.is_carried for trial in knee.trials].count(False) >= 1


def test_a_start_above_the_capacity_is_halved() -> None:
    knee = search(60.0)
    assert not knee.trials[0].is_carried
    assert knee.carried_per_s == 50.0


def test_the_search_ends_when_its_time_is_over() -> None:
    knee = search(1e9, seconds=35.0)
    assert len(knee.trials) == 3


@pytest.mark.parametrize("seen", [Seen(98.0, 5.0, 0), Seen(100.0, 101.0, 0), Seen(100.0, 5.0, 1)])
def test_a_rate_is_not_carried_if_it_is_missed_or_slow_or_fails(seen: Seen) -> None:
    knee = Knee(100.0, 1_000.0)
    knee.rate(20.0, seen)
    assert [trial.is_carried for trial in knee.trials] == [False]


def test_a_rate_is_held_for_its_whole_trial() -> None:
    knee = Knee(100.0, 1_000.0, Limits(trial_s=10.0))
    good = Seen(100.0, 1.0, 0)
    assert [knee.rate(at, good) for at in (1.0, 9.0, 10.0, 11.0)] == [100.0, 100.0, 150.0, 150.0]
