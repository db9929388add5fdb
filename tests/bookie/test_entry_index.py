"""The index against a dict."""

from __future__ import annotations

from random import Random

import pytest

from kvstore.bookie.entry_index import NOWHERE, EntryIndex, file_of, offset_of, place_of


def test_a_place_is_a_segment_and_an_offset() -> None:
    place = place_of(70_000, 1 << 31)
    assert (file_of(place), offset_of(place)) == (70_000, 1 << 31)


@pytest.mark.parametrize("seed", range(40))
def test_the_index_knows_what_a_dict_would(seed: int) -> None:
    random = Random(seed)
    index, model = EntryIndex(), {}
    entry = random.choice([0, 5, 1 << 40])
    for _ in range(300):
        step = random.random()
        entry = entry + 1 if step < 0.8 else max(0, entry + random.choice([-3, 2, 9, -200, 1 << 17, -(1 << 17)]))
        place, size = place_of(random.randint(1, 5), random.randint(64, 1 << 20)), random.randint(32, 5000)
        assert index.put(entry, place, size) == model.get(entry, NOWHERE)
        model[entry] = (place, size)
    assert list(index.entries()) == sorted(model)
    assert index.last == max(model)
    assert [entry for first, count in index.runs() for entry in range(first, first + count)] == sorted(model)
    for probe in [*model, *(entry + 1 for entry in model), 0, 1 << 62]:
        assert index.get(probe) == model.get(probe, NOWHERE)
    for file in range(1, 6):
        inside = [(entry, *where) for entry, where in sorted(model.items()) if file_of(where[0]) == file]
        assert index.inside(file) == inside


def test_an_empty_index_has_nothing() -> None:
    index = EntryIndex()
    assert (index.last, index.get(0), index.runs(), list(index.entries())) == (-1, NOWHERE, [], [])


def test_a_far_entry_costs_one_place_and_not_all_between() -> None:
    index = EntryIndex()
    index.put(0, place_of(1, 64), 50)
    index.put(1 << 60, place_of(1, 200), 50)
    assert len(index.places) == 1
    assert index.last == 1 << 60


def test_runs_of_two_segments_join_only_if_the_second_follows_on() -> None:
    first, second = EntryIndex(), EntryIndex()
    for entry in range(5):
        first.put(entry, place_of(1, 100 + entry), 10)
        second.put(entry + 5, place_of(2, 100 + entry), 10)
    joined = EntryIndex()
    assert joined.extend(0, first.places, first.sizes)
    assert not joined.extend(6, second.places, second.sizes)
    assert joined.extend(5, second.places, second.sizes)
    assert joined.runs() == [(0, 10)]
