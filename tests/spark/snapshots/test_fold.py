"""A chain of snapshots is what its logs leave, up to any cut; and two of them differ where their records do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.spark.snapshots import chains, compare
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.fold import folded
from tests.spark.snapshots.made import EPOCH_MS, Change, full, incremental, some_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]

LOG = some_log(180)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    """A full snapshot after 60 changes, incrementals after 120 and 180, and a full one of all."""
    store = DirectoryStore(tmp_path_factory.mktemp("snapshots"))
    first = full(store, "a", LOG[:60])
    second = incremental(store, "b", first, LOG[:120])
    incremental(store, "c", second, LOG, hour=2)
    full(store, "d", LOG, hour=2)
    return store


def model(log: list[Change]) -> dict[bytes, tuple[bytes, int]]:
    last = {change.key: change for change in log}
    return {key: (change.value, change.sequence) for key, change in last.items() if change.value is not None}


def records(spark: SparkSession, store: DirectoryStore, last: str, cut: Cut) -> dict[bytes, tuple[bytes, int]]:
    chain = chains.covering(store.load_all(), last, cut)
    rows = folded(spark, store, chain, cut).collect()
    found = {bytes(row["key"]): (bytes(row["value"]), row["version"]) for row in rows}
    assert len(found) == len(rows), "each key once"
    return found


def test_a_chain_is_what_the_log_leaves(spark: SparkSession, store: DirectoryStore) -> None:
    assert records(spark, store, "a", Cut()) == model(LOG[:60])
    assert records(spark, store, "c", Cut()) == records(spark, store, "d", Cut()) == model(LOG)


@pytest.mark.parametrize("count", [60, 61, 119, 120, 121, 175])
def test_a_chain_can_be_cut_at_any_moment(spark: SparkSession, store: DirectoryStore, count: int) -> None:
    cut = Cut(time_ms=EPOCH_MS + (count - 1) * 1000 + 1)  # no snapshot stands at the very moment of a write
    assert records(spark, store, "c", cut) == model(LOG[:count])


def test_a_chain_can_be_cut_at_a_sequence_of_one_partition(spark: SparkSession, store: DirectoryStore) -> None:
    kept = [change for change in LOG if change.partition == "p2" or change.sequence <= 100]
    assert records(spark, store, "c", Cut(sequences={"p1": 100})) == model(kept)


def test_a_directory_may_have_any_name(spark: SparkSession, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "a b\\c *?[x]{y,z}%20,\nü")
    full(store, "a", LOG)
    assert records(spark, store, "a", Cut()) == model(LOG)


def test_a_record_is_gone_at_its_expiry(spark: SparkSession, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    first = full(store, "a", [Change(b"k", b"v", 1, EPOCH_MS)])
    expiring = Change(b"k", b"w", 2, EPOCH_MS + 1000, expires_ms=EPOCH_MS + 3000)
    later = Change(b"later", b"", 3, EPOCH_MS + 9000)
    incremental(store, "b", first, [Change(b"k", b"v", 1, EPOCH_MS), expiring, later])
    assert records(spark, store, "b", Cut(time_ms=EPOCH_MS + 2999)) == {b"k": (b"w", 2)}
    assert records(spark, store, "b", Cut(time_ms=EPOCH_MS + 3000)) == {}


def test_two_snapshots_differ_where_their_records_do(spark: SparkSession, store: DirectoryStore) -> None:
    old, new = (folded(spark, store, chains.chain_of(store.load_all(), name), Cut()) for name in ("a", "c"))
    found = compare.differences(old, new, compare.CONTENT, 1000)
    before, after = model(LOG[:60]), model(LOG)
    both = before.keys() & after.keys()
    changed = {key for key in both if before[key][0] != after[key][0]}
    assert dict(found.examples) == {
        **dict.fromkeys(after.keys() - before.keys(), "added"),
        **dict.fromkeys(before.keys() - after.keys(), "removed"),
        **dict.fromkeys(changed, "changed"),
    }
    assert (found.same, found.count) == (len(both) - len(changed), len(found.examples))
    assert found.old_bytes == sum(len(key) + len(value) for key, (value, _) in before.items())
    assert found.new_bytes == sum(len(key) + len(value) for key, (value, _) in after.items())


def test_an_expiry_counts_as_content(spark: SparkSession, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    full(store, "a", [Change(b"k", b"v", 1, EPOCH_MS)])
    full(store, "b", [Change(b"k", b"v", 9, EPOCH_MS, expires_ms=EPOCH_MS + 1)], hour=1)
    full(store, "c", [Change(b"k", b"v", 12, EPOCH_MS)], hour=2)
    tables = {name: folded(spark, store, [store.load(name)], Cut()) for name in "abc"}
    assert compare.differences(tables["a"], tables["b"], compare.CONTENT, 5).changed == 1
    assert compare.differences(tables["a"], tables["c"], compare.CONTENT, 5).count == 0
    assert compare.differences(tables["a"], tables["c"], compare.EXACT, 5).changed == 1
