"""The index compared with a dict."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from kvstore.bookie.index.entry_index import NOWHERE, OFFSET_MASK, EntryIndex, file_of, joined, place_of
from kvstore.proto.availability import decode_availability, encode_availability


def entries(index: EntryIndex) -> list[int]:
    return [entry for first, count in index.runs() for entry in range(first, first + count)]


def test_place_is_a_segment_and_an_offset() -> None:
    place = place_of(70_000, 1 << 31)
    assert (file_of(place), place & OFFSET_MASK) == (70_000, 1 << 31)


@pytest.mark.parametrize("seed", range(40))
def test_index_behaves_like_a_dict(seed: int) -> None:
    random = Random(seed)
    index, model = EntryIndex(), {}
    entry = random.choice([0, 5, 1 << 40])
    for _ in range(300):
        step = random.random()
        entry = entry + 1 if step < 0.8 else max(0, entry + random.choice([-3, 2, 9, -200, 1 << 17, -(1 << 17)]))
        place, size = place_of(random.randint(1, 5), random.randint(64, 1 << 20)), random.randint(32, 5000)
        assert index.put(entry, place, size) == model.get(entry, NOWHERE)
        model[entry] = (place, size)
        if step < 0.02:
            index.compact()
        assert index.holes == index.places.count(0)
    assert entries(index) == sorted(model)
    assert index.count == len(model)
    assert index.bytes == sum(size for _, size in model.values())
    assert index.last == max(model)
    for probe in [*model, *(entry + 1 for entry in model), 0, 1 << 62]:
        assert index.get(probe) == model.get(probe, NOWHERE)
    found = index.columns()
    assert list(found.entries) == sorted(model)
    assert list(found.offsets) == [model[entry][0] & OFFSET_MASK for entry in sorted(model)]
    assert list(found.sizes) == [model[entry][1] for entry in sorted(model)]
    taken = index.detach()
    assert taken.columns() == found
    assert (index.last, index.runs(), index.count) == (-1, [], 0)


def test_empty_index_has_nothing() -> None:
    index = EntryIndex()
    assert (index.last, index.get(0), index.runs(), list(index.columns().entries)) == (-1, NOWHERE, [], [])


def test_distant_entry_costs_one_place_and_not_all_between() -> None:
    index = EntryIndex()
    index.put(0, place_of(1, 64), 50)
    index.put(1 << 60, place_of(1, 200), 50)
    assert len(index.places) == 1
    assert index.last == 1 << 60


@pytest.mark.parametrize("gap", [3, 900, 1 << 16, 1 << 40])
def test_distant_entries_cost_no_more_memory_than_near_ones(gap: int) -> None:
    """A ledger's writer may add any entries: 1,000 small entries at certain distances took 786 MB of memory."""
    index = EntryIndex()
    for entry in range(0, 2000 * gap, gap):
        index.put(entry, place_of(1, 64 + entry // gap), 50)
    index.compact()
    assert len(index.places) + 16 * len(index.others) < 70_000
    assert entries(index) == list(range(0, 2000 * gap, gap))


def test_entries_after_a_gap_are_stored_compactly() -> None:
    index = EntryIndex()
    for entry in [*range(10), *range(50_000, 60_000)]:
        index.put(entry, place_of(1, 64 + entry), 50)
    assert index.others
    index.compact()
    assert not index.others
    assert index.runs() == [(0, 10), (50_000, 10_000)]
    assert list(index.columns().entries) == entries(index)


@pytest.mark.parametrize(("ensemble", "write"), [(4, 2), (5, 3), (7, 2)])
def test_runs_of_a_striped_ledger_follow_its_write_sets(ensemble: int, write: int) -> None:
    for place in range(ensemble):
        held = [entry for entry in range(2000) if (place - entry) % ensemble < write]
        index = EntryIndex()
        for entry in held:
            index.put(entry, place_of(1, 64 + entry), 50)
        assert not index.others
        runs = index.runs()
        assert [entry for first, count in runs for entry in range(first, first + count)] == held
        assert all(sum(run) < following[0] for run, following in pairwise(runs))
        listed = decode_availability(encode_availability(runs))
        assert list(listed) == held
        assert listed.between(7, 1234) == {entry for entry in held if 7 <= entry <= 1234}


def test_overlapping_or_touching_runs_are_joined() -> None:
    assert joined([(7, 3), (0, 5), (5, 2), (1, 2), (20, 1)]) == [(0, 10), (20, 1)]
