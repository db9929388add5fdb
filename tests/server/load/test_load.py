"""Findings about the load of partitions, and the moves that they suggest."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvstore.ring import MURMUR3, TOKENS, Ring, plan, steps
from kvstore.server.load.load import KEYS_MAX, LoadTracker, PartitionLoad, TopKeys, decode, encode, suggest
from kvstore.types import PartitionId
from tests.ring.rings import ring_of, settle

P1, P2, P3 = (PartitionId(f"p{i}") for i in range(1, 4))


@pytest.mark.parametrize("seed", range(10))
def test_hot_keys_are_found_and_never_overstated(seed: int) -> None:
    random = Random(seed)
    hot = [b"hot-%d" % number for number in range(3)]
    keys = [random.choice(hot) if random.random() < 0.3 else random.randbytes(4) for _ in range(5_000)]
    sketch, true = TopKeys(), Counter(keys)
    for key in keys:
        sketch.add(key)
    found = {each.key: each.share for each in sketch.top(10)}
    assert set(hot) == set(found)
    assert all(share <= true[key] / len(keys) for key, share in found.items())
    assert all(share > true[key] / len(keys) - 1 / KEYS_MAX for key, share in found.items())


def test_no_key_is_named_without_hot_keys() -> None:
    sketch = TopKeys()
    for number in range(5_000):
        sketch.add(b"%d" % number)
    assert sketch.top(10) == ()


def test_old_hot_keys_fade() -> None:
    sketch = TopKeys()
    for _ in range(1_000):
        sketch.add(b"old")
    sketch.fade(0.01)
    for _ in range(1_000):
        sketch.add(b"new")
    assert [each.key for each in sketch.top(10)] == [b"new"]


def heat_of(partition: PartitionId, ops_per_s: float, keys: list[bytes]) -> PartitionLoad:
    heat = LoadTracker(partition, MURMUR3)
    heat.sampled((key, 100) for key in keys)
    for second in range(100):
        heat.counted(ops_per_s * second, ops_per_s / 2 * second, float(second))
    heat.sampled((key, 100) for key in keys)
    return heat.load()


def test_rates_follow_counters_across_leaderships() -> None:
    heat = LoadTracker(P1, MURMUR3)
    for second in range(60):
        heat.counted(1000.0 * second, 500.0 * second, float(second))
    heat.counted(10.0, 5.0, 60.0)
    heat.sampled([(b"k", 200)] * 500)
    load = heat.load()
    assert load.ops_per_s == pytest.approx(1000, rel=0.01)
    assert load.writes_per_s == pytest.approx(500, rel=0.01)
    assert load.written_bytes_per_s == pytest.approx(500 * 200, rel=0.02)


def owned_keys(ring: Ring, partition: PartitionId, count: int = 2_000) -> list[bytes]:
    found = (key for number in range(1_000_000) if ring.partition_of(key := b"key-%d" % number) == partition)
    return [next(found) for _ in range(count)]


def test_overloaded_partition_gives_range_to_least_loaded() -> None:
    ring = ring_of(3)
    keys = owned_keys(ring, P1)
    loads = {
        P1: heat_of(P1, 10_000, keys),
        P2: heat_of(P2, 2_000, owned_keys(ring, P2)),
        P3: heat_of(P3, 1_000, owned_keys(ring, P3)),
    }
    [suggestion] = suggest(ring, loads)
    assert (suggestion.source, suggestion.target) == (P1, P3)
    assert f"ring move p3 --first {suggestion.first} --last {suggestion.last}" in suggestion.text
    after = settle(plan.shift_range(ring, suggestion.first, suggestion.last, P3))
    moved = sum(after.partition_of(key) == P3 for key in keys) / len(keys) * 10_000
    assert moved == pytest.approx(suggestion.ops_per_s, rel=0.5)
    assert 0 < moved < 10_000 - 4_333 + 500, "no more than what is above the mean"


def test_single_hot_key_is_named_without_a_move() -> None:
    ring = ring_of(3)
    key = owned_keys(ring, P1, 1)[0]
    loads = {P1: heat_of(P1, 10_000, [key] * 900 + owned_keys(ring, P1, 100))}
    [suggestion] = suggest(ring, loads)
    assert suggestion.target == ""
    assert key.decode() in suggestion.text


def test_nothing_is_suggested_for_even_small_or_moving_load() -> None:
    ring = ring_of(3)
    even = {each: heat_of(each, 5_000, owned_keys(ring, each)) for each in (P1, P2, P3)}
    assert suggest(ring, even) == []
    small = {P1: heat_of(P1, 100, owned_keys(ring, P1))}
    assert suggest(ring, small) == []
    moving = plan.shift(ring, P1, P2, TOKENS // 100)
    moving = steps.begin(moving, min(moving.moves), 1)
    assert suggest(moving, {P1: heat_of(P1, 9_000, owned_keys(ring, P1))}) == []


def test_loads_survive_encoding() -> None:
    loads = (heat_of(P1, 10, [b"\xff\x00", *(b"%d" % n for n in range(500))]),)
    assert decode(encode(loads)) == loads
    assert list(loads[0].tokens) == sorted(loads[0].tokens)
    assert MURMUR3.token_of(b"\xff\x00") >= 0
