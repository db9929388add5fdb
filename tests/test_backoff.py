"""Delays between attempts grow up to a limit."""

from itertools import islice
from random import Random
from statistics import mean

import pytest

from kvstore.backoff import delays


def test_delay_bounds_grow_to_the_cap() -> None:
    runs = [list(islice(delays(Random(seed), first_s=1, cap_s=10), 7)) for seed in range(2000)]
    for bound, column in zip((1, 2, 4, 8, 10, 10, 10), zip(*runs, strict=True), strict=True):
        assert 0 <= min(column) < 0.01 * bound
        assert 0.99 * bound < max(column) <= bound
        assert mean(column) == pytest.approx(bound / 2, rel=0.1)


def test_same_seed_gives_same_delays() -> None:
    one, other = (list(islice(delays(Random(7), first_s=0.1, cap_s=3, factor=1.5), 20)) for _ in range(2))
    assert one == other


@pytest.mark.parametrize(("first_s", "cap_s", "factor"), [(0, 1, 2), (-1, 1, 2), (2, 1, 2), (1, 2, 0.5)])
def test_backoff_refuses_impossible_bounds(first_s: float, cap_s: float, factor: float) -> None:
    with pytest.raises(ValueError, match="expected 0 < first_s"):
        next(delays(Random(1), first_s=first_s, cap_s=cap_s, factor=factor))
