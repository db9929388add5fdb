"""Rates follow the shape, and the search for the knee ends at the capacity."""

from __future__ import annotations

import pytest

from kvstore.loadtest.generator.shapes import (
    NAMES,
    KneeLimits,
    KneeShape,
    RecentResults,
    RecentResultsOf,
    Shape,
    shape_of,
)


def nothing(seconds: float) -> RecentResults | None:
    """It is too early for a verdict."""
    return None


def looks(seen: RecentResults) -> RecentResultsOf:
    return lambda seconds: seen


GOOD, BAD = looks(RecentResults(100.0, 100.0, 1.0, 0)), looks(RecentResults(100.0, 60.0, 900.0, 0))


def rates(shape: Shape, *ats: float) -> list[float | None]:
    return [shape.rate(at, nothing) for at in ats]


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_begins_above_zero_and_ends_in_time(name: str) -> None:
    shape = shape_of(name, 100.0, 60.0)
    assert (shape.rate(0.0, nothing) or 0) > 0
    assert shape.rate(60.0, nothing) is None


def test_steps_are_equal_and_end_at_the_rate() -> None:
    assert rates(shape_of("step", 100, 50), 0, 9, 10, 29, 49) == [20, 20, 40, 60, 100]


def test_spike_is_several_times_the_rate_and_ends() -> None:
    assert rates(shape_of("spike", 100, 100), 0, 39, 40, 59, 60, 99) == [100, 100, 400, 400, 100, 100]


def test_soak_rises_slowly_and_then_stays() -> None:
    assert rates(shape_of("soak", 100, 100), 0, 5, 10, 99) == [10, 50, 100, 100]


def test_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="find-it"):
        shape_of("find-it", 1, 1)


def search(capacity: float, *, start: float = 100.0, seconds: float = 10_000.0) -> KneeShape:
    """Search against a store that carries `capacity`. The remaining operations stay due, and make later rates late."""
    knee = KneeShape(start, seconds)
    at, rate, since, late = 0.0, knee.rate(0.0, nothing), 0.0, 0.0
    while rate is not None:
        at += 1.0
        late = max(0.0, late + rate - capacity)
        seen = RecentResults(rate, rate * 0.6, 900.0, 0) if late else RecentResults(rate, rate, 5.0, 0)
        held_s = at - since
        following = knee.rate(at, lambda seconds, held_s=held_s, seen=seen: seen if held_s > 4 + seconds else None)
        if following != rate:
            rate, since = following, at
    return knee


@pytest.mark.parametrize("capacity", [120.0, 500.0, 1_234.0, 9_000.0])
def test_search_ends_close_below_the_capacity(capacity: float) -> None:
    knee = search(capacity)
    assert 0.85 * capacity < knee.sustained_per_s <= capacity
    assert [trial.is_carried for trial in knee.trials].count(False) >= 1


def test_start_above_the_capacity_is_halved() -> None:
    knee = search(60.0)
    assert not knee.trials[0].is_carried
    assert knee.sustained_per_s == 50.0


def test_finer_rate_is_tried_when_nothing_is_late_any_more() -> None:
    """The rate after 100 and 150 is 125: carried by a store that carries 130, but not with the backlog of 150."""
    knee = search(130.0)
    assert [(trial.per_s, trial.is_carried) for trial in knee.trials] == [
        (100.0, True),
        (150.0, False),
        (125.0, True),
        (137.5, False),
    ]


def test_after_an_overload_half_the_carried_rate_is_held() -> None:
    knee = KneeShape(100.0, 1_000.0)
    assert [knee.rate(20.0, GOOD), knee.rate(40.0, BAD)] == [150.0, 50.0]
    assert [knee.rate(at, look) for at, look in ((41.0, nothing), (50.0, BAD), (60.0, GOOD))] == [50.0, 50.0, 125.0]


def test_store_that_does_not_come_back_ends_the_search() -> None:
    knee = KneeShape(100.0, 1_000.0, KneeLimits(rest_s_max=30.0))
    assert [knee.rate(20.0, GOOD), knee.rate(40.0, BAD)] == [150.0, 50.0]
    assert [knee.rate(69.0, BAD), knee.rate(70.0, BAD)] == [50.0, None]


def test_search_ends_when_its_time_is_over_and_found_nothing() -> None:
    knee = search(1e9, seconds=50.0)
    assert len(knee.trials) == 3
    assert knee.missing == "the knee was not found: the run ended while 225/s were still sustained"


def test_search_that_judged_nothing_or_carried_nothing_found_nothing() -> None:
    assert "before any rate was judged" in str(search(1e9, seconds=5.0).missing)
    assert "no rate was sustained, not even 100/s" in str(search(1.0).missing)


def test_knee_is_between_a_rate_that_was_carried_and_one_that_was_not() -> None:
    knee = search(500.0)
    assert knee.missing is None
    assert knee.sustained_per_s <= 500.0 < knee.failed_per_s


@pytest.mark.parametrize(
    "seen",
    [
        RecentResults(100.0, 98.0, 5.0, 0),
        RecentResults(104.0, 100.0, 5.0, 0),
        RecentResults(100.0, 100.0, 101.0, 0),
        RecentResults(100.0, 100.0, 5.0, 1),
    ],
)
def test_rate_is_not_carried_if_it_is_missed_or_slow_or_fails(seen: RecentResults) -> None:
    """Missed operations are those due for the running users, which can exceed the rate."""
    knee = KneeShape(100.0, 1_000.0)
    knee.rate(20.0, looks(seen))
    assert [trial.is_carried for trial in knee.trials] == [False]


def test_rate_is_held_until_a_complete_trial_was_measured() -> None:
    knee = KneeShape(100.0, 1_000.0, KneeLimits(trial_s=10.0))
    assert [knee.rate(at, nothing) for at in (1.0, 30.0)] == [100.0, 100.0]
    asked = []

    def look(seconds: float) -> RecentResults:
        asked.append(seconds)
        return RecentResults(100.0, 100.0, 1.0, 0)

    assert knee.rate(31.0, look) == 150.0
    assert asked == [10.0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "knee"])
def test_only_the_search_uses_recent_results(name: str) -> None:
    def look(seconds: float) -> RecentResults:
        raise AssertionError("looked")

    assert shape_of(name, 100.0, 60.0).rate(30.0, look)
