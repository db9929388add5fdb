"""A chain of snapshots equals the result of its logs, up to any cut; and two chains differ where their records do. By
Spark, and by this process alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import StoreError
from kvstore.spark.snapshots import chains, local_tables
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.local_tables import LocalTables
from kvstore.spark.snapshots.tables import CONTENT, EXACT, Tables
from tests.spark.snapshots.made import EPOCH_MS, Change, full, incremental, some_log

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


@pytest.fixture(params=["here", pytest.param("spark", marks=pytest.mark.spark)])
def tables(request: pytest.FixtureRequest) -> Tables[Any]:
    if request.param == "here":
        return LocalTables()
    from kvstore.spark.snapshots.spark_tables import SparkTables

    return SparkTables(request.getfixturevalue("spark"))


def records(tables: Tables[Any], store: DirectoryStore, last: str, cut: Cut) -> dict[bytes, tuple[bytes, int]]:
    chain = chains.covering(store.load_all(), last, cut)
    return records_of(tables.folded(store, chain, cut))


def records_of(table: Any) -> dict[bytes, tuple[bytes, int]]:
    if isinstance(table, local_tables.Rows):
        rows = [row for batch in table.batches() for row in batch.to_pylist()]
    else:
        rows = [row.asDict() for row in table.collect()]
    found = {bytes(row["key"]): (bytes(row["value"]), row["version"]) for row in rows}
    assert len(found) == len(rows), "each key once"
    return found


def at(count: int) -> Cut:
    """After so many changes: no snapshot is at the exact time of a write."""
    return Cut(time_ms=EPOCH_MS + (count - 1) * 1000 + 1)


def test_chain_is_what_the_log_leaves(tables: Tables[Any], store: DirectoryStore) -> None:
    assert records(tables, store, "a", Cut()) == model(LOG[:60])
    assert records(tables, store, "c", Cut()) == records(tables, store, "d", Cut()) == model(LOG)


@pytest.mark.parametrize("count", [60, 61, 119, 120, 121, 175])
def test_chain_can_be_cut_at_any_moment(store: DirectoryStore, count: int) -> None:
    assert records(LocalTables(), store, "c", at(count)) == model(LOG[:count])


def test_chain_can_be_cut(tables: Tables[Any], store: DirectoryStore) -> None:
    assert records(tables, store, "c", at(121)) == model(LOG[:121])
    kept = [change for change in LOG if change.partition == "p2" or change.sequence <= 100]
    assert records(tables, store, "c", Cut(sequences={"p1": 100})) == model(kept)


# docs/protocol.md Tx13
@pytest.mark.parametrize("value", [b"new", None])
def test_row_in_several_snapshots_counts_once(tables: Tables[Any], tmp_path: Path, value: bytes | None) -> None:
    """A committed intent that is at several positions is in each of the snapshots."""
    store = DirectoryStore(tmp_path)
    old, by_intent, other = Change(b"a", b"old", 1, 1), Change(b"a", value, 5, 1), Change(b"b", b"1", 1, 1)
    first = full(store, "a", [old, other])
    second = incremental(store, "b", first, [old, other, by_intent])
    later = replace(second, partitions=first.partitions)  # as if the row came again
    incremental(store, "c", replace(later, id="b"), [old, other, by_intent], hour=2)
    expected = {b"b": (b"1", 1)} | ({b"a": (value, 5)} if value else {})
    chain = [store.load(each) for each in "abc"]
    assert [each.rows for each in chain] == [2, 1, 1]
    assert records_of(tables.folded(store, chain, Cut())) == expected


def test_directory_may_have_any_name(tables: Tables[Any], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "a b\\c *?[x]{y,z}%20,\nü")
    full(store, "a", LOG)
    assert records(tables, store, "a", Cut()) == model(LOG)


def test_record_is_gone_at_its_expiry(tables: Tables[Any], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    first = full(store, "a", [Change(b"k", b"v", 1, EPOCH_MS)])
    expiring = Change(b"k", b"w", 2, EPOCH_MS + 1000, expires_ms=EPOCH_MS + 3000)
    later = Change(b"later", b"", 3, EPOCH_MS + 9000)
    incremental(store, "b", first, [Change(b"k", b"v", 1, EPOCH_MS), expiring, later])
    assert records(tables, store, "b", Cut(time_ms=EPOCH_MS + 2999)) == {b"k": (b"w", 2)}
    assert records(tables, store, "b", Cut(time_ms=EPOCH_MS + 3000)) == {}


@dataclass(frozen=True)
class Moving(Change):
    """A key whose range moves."""

    owner: str = "p1"

    @property
    def partition(self) -> str:
        return self.owner


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32), st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 61))
def test_any_chain_is_the_state_at_any_cut(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ends: list[int], count: int
) -> None:
    """Puts and deletes of binary, long and empty keys and values, over partitions, with snapshots at any of them."""
    chooser = random.Random(seed)
    keys = [b"", b"\0", b"\xff\xfe", b"k" * 4096, b"a", b"b"][1:]
    log: list[Change] = []
    for number in range(61):
        value = None if chooser.random() < 0.3 else chooser.choice([b"", b"\0", b"x" * 5000, b"%d" % number])
        owner = chooser.choice(["p1", "p2"])
        log.append(Moving(chooser.choice(keys), value, number + 1, EPOCH_MS + number * 1000, owner=owner))
    store = DirectoryStore(tmp_path_factory.mktemp("snapshots"))
    first, *others = sorted(ends)
    last = full(store, "a", log[:first])
    for hour, end in enumerate(others, start=1):
        last = incremental(store, f"b{hour}", last, log[:end], hour=hour)
    end = max(ends)
    assert records(LocalTables(), store, last.id, Cut()) == model(log[:end])
    if first < count < end:
        assert records(LocalTables(), store, last.id, at(count)) == model(log[:count])


def test_two_snapshots_differ_where_their_records_do(tables: Tables[Any], store: DirectoryStore) -> None:
    old, new = (tables.folded(store, chains.chain_of(store.load_all(), name), Cut()) for name in ("a", "c"))
    found = tables.differences(old, new, CONTENT, 1000)
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


def test_expiry_counts_as_content_and_on_request_a_version(tables: Tables[Any], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    keys = [b"expires", b"written again", b"same"]
    full(store, "a", [Change(key, b"v", number, EPOCH_MS) for number, key in enumerate(keys, start=1)])
    expiring, again = Change(keys[0], b"v", 1, EPOCH_MS, expires_ms=EPOCH_MS + 1), Change(keys[1], b"v", 9, EPOCH_MS)
    full(store, "b", [expiring, again, Change(keys[2], b"v", 3, EPOCH_MS)], hour=1)
    old, new = (tables.folded(store, [store.load(name)], Cut()) for name in "ab")
    assert tables.differences(old, new, CONTENT, 5).examples == ((keys[0], "changed"),)
    assert tables.differences(old, new, EXACT, 5).examples == ((keys[0], "changed"), (keys[1], "changed"))


def test_rows_are_refused_when_their_file_becomes_a_link_after_the_check(tables: Tables[Any], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "snapshots")
    manifest = full(store, "a", LOG)
    table = tables.folded(store, [manifest], Cut())
    path = store.folder("a") / manifest.files[0].path
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")

    def count(batches: Iterator[Any]) -> dict[str, int]:
        return {"rows": sum(batch.num_rows for batch in batches)}

    with pytest.raises(StoreError, match="expected a regular file, got a symbolic link"):
        tables.work_through(table, ("key",), count, ("rows",))
