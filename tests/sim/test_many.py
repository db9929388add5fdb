"""All of thousands of seeds are played, also where one process's share ends and the next begins."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.queue import WriteQueue
from tests.sim.judges import branches, reach
from tests.sim.many import BRANCH_SEEDS, Tally, split, tallies


def told(seeds: range) -> Tally:
    return Tally(seeds=len(seeds), failures=[str(seed) for seed in seeds])


def test_every_seed_is_played_once() -> None:
    seeds = range(7, 304)
    found = list(tallies(seeds, told))
    assert [failure for each in found for failure in each.failures] == [str(seed) for seed in seeds]


@pytest.mark.parametrize("expected", [reach.PLAIN, reach.TRANSACTING])
def test_operation_path_or_fault_is_named_when_no_seed_reached_it(expected: reach.Expected) -> None:
    operations, paths, struck = Counter(expected.operations), Counter(list(expected.paths)), Counter(expected.faults)
    assert expected.missed(operations, paths, struck) == []
    for kind, reached in (("operation", operations), ("path", paths), ("fault", struck)):
        for name in reached:
            reached[name] -= 1
            assert expected.missed(operations, paths, struck) == [f"{kind}: {name}"]
            reached[name] += 1


def test_branches_are_always_judged_by_same_seeds() -> None:
    assert split(range(5_000)) == (BRANCH_SEEDS, range(60, 5_000))
    assert split(range(40)) == (range(0), range(40))
    assert split(range(7, 5_000)) == (range(0), range(7, 5_000))


def test_branches_not_taken_are_listed_with_a_reason() -> None:
    """This test shows only that the list names existing branches. The seeds show if the list is right."""
    listed = branches.listed()
    _, missed = branches.names_of({})
    assert set(listed) <= missed, f"no longer in the code: {sorted(set(listed) - missed)[:9]}"
    assert all(len(why) > 20 for why in listed.values())


def test_branch_is_noticed_when_it_is_new_or_its_listing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with branches.measuring() as measured:
        WriteQueue(PartitionConfig()).take_older(0.0)
    taken, missed = branches.names_of(measured.arcs)
    some = next(name for name in taken if "take_older" in name)
    monkeypatch.setattr(branches, "listed", lambda: dict.fromkeys([some, *sorted(missed)[1:]], "why"))
    new, gone, _ = branches.judged(measured.arcs)
    assert (new, gone) == (sorted(missed)[:1], [some])
