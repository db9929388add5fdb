"""Keys follow their distribution, and are the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random

import pytest

from kvstore.loadtest.generator.choosers import (
    Chooser,
    HotSet,
    Latest,
    Ranks,
    Uniform,
    Zipfian,
    chooser_of,
    scattering_stride,
)

DRAWS = 40_000
NAMES = ("uniform", "zipfian", "latest", "hotset", "zipfian:1.2", "hotset:0.2:0.5")


def draws(chooser: Chooser, count: int, seed: int = 7) -> Counter[int]:
    random = Random(seed)
    return Counter(chooser.pick(random, count) for _ in range(DRAWS))


def expected_share(rank: int, size: int, constant: float = 0.99) -> float:
    return (1 / (rank + 1) ** constant) / sum(1 / (each + 1) ** constant for each in range(size))


def misfit(observed: Counter[int], shares: dict[int, float]) -> float:
    """Pearson's chi-square, per degree of freedom: about 1 if the draws follow the shares."""
    expected = {key: share * DRAWS for key, share in shares.items()}
    return sum((observed[key] - each) ** 2 / each for key, each in expected.items()) / (len(expected) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_row_of_keys_and_another_seed_another(name: str) -> None:
    chooser = chooser_of(name, 1_000)
    rows = [list(islice((chooser.pick(r, 1_000) for r in [Random(seed)] * 50), 50)) for seed in (1, 1, 2)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 10, 997])
def test_every_pick_is_an_existing_key(name: str, size: int) -> None:
    chooser, random = chooser_of(name, size), Random(3)
    assert {chooser.pick(random, size) for _ in range(500)} <= set(range(size))


def test_uniform_picks_every_key_equally() -> None:
    assert misfit(draws(Uniform(), 100), dict.fromkeys(range(100), 1 / 100)) < 1.5


def test_zipfian_picks_the_kth_key_in_proportion_to_its_rank() -> None:
    chooser = Zipfian(200)
    found = draws(chooser, 200)
    assert misfit(found, {chooser.key_of(rank): expected_share(rank, 200) for rank in range(200)}) < 1.5
    assert misfit(found, dict.fromkeys(range(200), 1 / 200)) > 100


def test_higher_constant_makes_the_first_key_more_frequent() -> None:
    shares = [Ranks(1_000, constant).share(0) for constant in (0.5, 0.99, 1.5)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(expected_share(0, 1_000))


@pytest.mark.parametrize("size", [1, 2, 6, 100, 1_000, 65_536])
def test_scattering_gives_each_rank_a_key_of_its_own(size: int) -> None:
    stride = scattering_stride(size)
    assert len({rank * stride % size for rank in range(size)}) == size


def test_most_frequent_zipfian_keys_are_not_neighbours() -> None:
    first = [Zipfian(1_000).key_of(rank) for rank in range(5)]
    assert min(abs(a - b) for a in first for b in first if a != b) > 50


def test_latest_picks_the_newest_key_most_and_follows_inserts() -> None:
    chooser = Latest(200)
    for count in (200, 350):
        found = draws(chooser, count)
        assert misfit(found, {count - 1 - rank: expected_share(rank, 200) for rank in range(200)}) < 1.5


def test_hot_set_gets_its_share_evenly_and_the_others_the_rest() -> None:
    chooser = HotSet(1_000, hot=0.05, wanted=0.8)
    shares = {key: 0.8 / 50 if chooser.is_hot(key) else 0.2 / 950 for key in range(1_000)}
    assert sum(map(chooser.is_hot, range(1_000))) == 50
    assert misfit(draws(chooser, 1_000), shares) < 1.5


@pytest.mark.parametrize(
    "text",
    ["", "zipf", "zipfian:x", "zipfian:0", "hotset:2:0.5", "hotset:0.1", "uniform:3", "zipfian:1000", "latest:nan"],
)
def test_unknown_key_chooser_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text!r}"):
        chooser_of(text, 10)
