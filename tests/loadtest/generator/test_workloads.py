"""Mixes match their names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from kvstore.loadtest.generator.endpoints import first_values
from kvstore.loadtest.generator.expectations import Expectations
from kvstore.loadtest.generator.workloads import WORKLOADS, Draws, Keyspace, workloads_of
from kvstore.loadtest.report.goals import INSERT, MODIFY, READ, SCAN, UPDATE

YCSB = {
    "ycsb-a": {READ: 0.5, UPDATE: 0.5},
    "ycsb-b": {READ: 0.95, UPDATE: 0.05},
    "ycsb-c": {READ: 1.0},
    "ycsb-d": {READ: 0.95, INSERT: 0.05},
    "ycsb-e": {SCAN: 0.95, INSERT: 0.05},
    "ycsb-f": {READ: 0.5, MODIFY: 0.5},
}


@pytest.mark.parametrize("name", YCSB)
def test_each_core_workload_draws_ycsbs_shares(name: str) -> None:
    draws, random = Draws(WORKLOADS[name], 100), Random(1)
    found = Counter(draws.operation(random) for _ in range(10_000))
    assert found.keys() == YCSB[name].keys()
    for operation, share in YCSB[name].items():
        assert found[operation] / 10_000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("name", WORKLOADS)
def test_operations_can_be_drawn_from_each_workload(name: str) -> None:
    draws, random = Draws(WORKLOADS[name], 50), Random(1)
    assert 0 <= draws.key(random, 50) < 50
    assert draws.size(random) > 0
    assert 1 <= draws.scan_length(random) <= WORKLOADS[name].scan_max


def test_keys_and_sizes_can_be_others() -> None:
    (found,) = workloads_of("ycsb-a", keys="uniform", sizes="7")
    assert (found.keys, found.sizes, found.operations) == ("uniform", "7", WORKLOADS["ycsb-a"].operations)


@pytest.mark.parametrize("text", ["", "ycsb-z", "ycsb-a,nothing"])
def test_unknown_workload_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match="ycsb-f"):
        workloads_of(text)


def test_insert_is_read_once_it_was_acknowledged_and_not_before() -> None:
    keyspace, random = Keyspace(b"p/", 10, writer=3), Random(1)
    key = keyspace.new_record(random)
    assert keyspace.count == 10
    keyspace.inserted(key)
    assert keyspace.count == 11
    assert keyspace.record(10) == key
    assert key.startswith(keyspace.records)


def test_two_processes_never_insert_one_key() -> None:
    mine, others = (Keyspace(b"p/", 10, writer=writer) for writer in (1, 2))
    keys = [keyspace.new_record(Random(1)) for keyspace in (mine, others) for _ in range(100)]
    assert len(set(keys)) == 200


def test_registers_and_counters_are_not_records() -> None:
    keyspace = Keyspace(b"p/", 10, writer=1)
    names = {keyspace.record(3), keyspace.register(3), keyspace.counter(3)}
    assert len(names) == 3
    assert sum(name.startswith(keyspace.records) for name in names) == 1


@pytest.mark.parametrize(("keys", "size", "lengths"), [(2_500, 100, [1_000, 1_000, 500]), (20, 1 << 20, [8, 8, 4])])
def test_initial_records_are_split_into_parts_of_one_message(keys: int, size: int, lengths: list[int]) -> None:
    """A thousand values of a mebibyte were one call, whose deadline passed."""
    draws, keyspace = Draws(replace(WORKLOADS["ycsb-a"], sizes=str(size)), keys), Keyspace(b"t/", keys, 1)
    parts = list(first_values(keyspace, draws, Expectations(1), Random(1)))
    assert [len(part) for part in parts] == lengths
    assert [key for part in parts for key in part] == [keyspace.record(number) for number in range(keys)]
