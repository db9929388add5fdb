"""Thousands of seeds are played whole: none is left out where one process's share ends and the next begins."""

from __future__ import annotations

from tests.sim.many import Tally, tallies


def told(seeds: range) -> Tally:
    return Tally(seeds=len(seeds), failures=[str(seed) for seed in seeds])


def test_every_seed_is_played_once() -> None:
    seeds = range(7, 304)
    found = list(tallies(seeds, told))
    assert [failure for each in found for failure in each.failures] == [str(seed) for seed in seeds]
