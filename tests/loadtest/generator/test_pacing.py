"""Schedules keep their rate, independent of the store."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import pstdev

import pytest

from kvstore.loadtest.generator.pacing import BURSTS, EVEN, POISSON, Arrivals, begins


def first(
    arrivals: Arrivals, count: int, *, per_s: float = 20.0, since_s: float = 1_000.0, seed: int = 1
) -> list[float]:
    return list(islice(begins(arrivals, per_s, since_s, Random(seed)), count))


@pytest.mark.parametrize("arrivals", [POISSON, EVEN, BURSTS])
def test_begins_rise_and_keep_the_rate(arrivals: Arrivals) -> None:
    found = first(arrivals, 20_000)
    assert found == sorted(found)
    assert found[0] >= 1_000
    assert (found[-1] - found[0]) / 20_000 == pytest.approx(1 / 20, rel=0.03)


@pytest.mark.parametrize("arrivals", [POISSON, EVEN, BURSTS])
def test_one_seed_gives_one_schedule(arrivals: Arrivals) -> None:
    assert first(arrivals, 50) == first(arrivals, 50) != first(arrivals, 50, seed=2)


def test_even_users_are_even_and_begin_at_different_times() -> None:
    found = first(EVEN, 100)
    assert [b - a for a, b in pairwise(found)] == pytest.approx([0.05] * 99)
    assert len({first(EVEN, 1, seed=seed)[0] for seed in range(20)}) == 20


def test_poisson_distances_scatter_as_much_as_their_mean() -> None:
    found = first(POISSON, 20_000)
    gaps = [b - a for a, b in pairwise(found)]
    assert pstdev(gaps) == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("since_s", [1_000.0, 1_000.5, 1_003.3, 1_004.9])
def test_bursts_of_all_users_meet(since_s: float) -> None:
    found = first(BURSTS, 2_000, since_s=since_s)
    assert max(at % 5 for at in found) < 1.0 + 1e-6
    assert min(found) >= since_s - 1e-6 or since_s % 5 < 1


def test_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        first(POISSON, 1, per_s=0)
