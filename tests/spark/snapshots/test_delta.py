"""A chain of snapshots as a Delta table: the contents of each snapshot are a version of the table."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from kvstore.cli.main import build
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.spark.options import types_of
from kvstore.spark.snapshots import chains, delta
from kvstore.spark.snapshots.directory import DirectoryStore
from tests.spark.snapshots.made import EPOCH_MS, Change, full, incremental, some_log
from tests.spark.test_protobuf_values import SHOP, described, message_at

FIRST, SECOND, THIRD = some_log(40), some_log(30, start=40), some_log(20, start=70)


def left(log: list[Change]) -> dict[bytes, bytes]:
    return {key: value for key, value in {each.key: each.value for each in log}.items() if value is not None}


def rows(table: Path, version: int | None = None) -> dict[bytes, bytes]:
    found = DeltaTable(str(table), version=version).to_pyarrow_table().to_pylist()
    assert len(found) == len({row["key"] for row in found}), "each key once"
    return {row["key"]: row["value"] for row in found}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "snapshots")
    incremental(store, "b", full(store, "a", FIRST), FIRST + SECOND)
    return store


def test_each_snapshot_is_a_version_and_the_next_adds_only_later_changes(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "MERGE_ROWS", 7)
    table = tmp_path / "table"
    assert delta.export(store, chains.chain_of(store.load_all(), "b"), str(table)) == ["a", "b"]
    assert rows(table) == left(FIRST + SECOND)
    incremental(store, "c", store.load("b"), FIRST + SECOND + THIRD, hour=2)
    chain = chains.chain_of(store.load_all(), "c")
    seen: list[int] = []
    assert delta.export(store, chain, str(table), seen.append) == ["c"]
    assert sum(seen) == store.load("c").rows
    assert [rows(table, version) for version in range(3)] == [
        left(FIRST),
        left(FIRST + SECOND),
        left(FIRST + SECOND + THIRD),
    ]
    assert delta.export(store, chain, str(table)) == []


def test_another_full_snapshot_of_the_cluster_is_written_over_it(store: DirectoryStore, tmp_path: Path) -> None:
    """As on Sundays: no incremental leads there from the snapshot of the table."""
    table = tmp_path / "table"
    log = FIRST + SECOND + THIRD
    delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))
    incremental(store, "y", full(store, "x", log[:80], hour=8), log, hour=9)
    assert delta.export(store, chains.chain_of(store.load_all(), "y"), str(table)) == ["x", "y"]
    found = [rows(table, version) for version in range(1, 4)]
    assert found == [left(log[:70]), left(log[:80]), left(log)]
    with pytest.raises(InvalidRequest, match="has snapshot y, which is later than b"):
        delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))


def test_optimized_table_can_continue(store: DirectoryStore, tmp_path: Path) -> None:
    table = tmp_path / "table"
    catalogue = store.load_all()
    delta.export(store, chains.chain_of(catalogue, "a"), str(table))
    delta.export(store, chains.chain_of(catalogue, "b"), str(table))
    found = DeltaTable(str(table))
    found.optimize.compact()
    found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    incremental(store, "c", store.load("b"), FIRST + SECOND + THIRD, hour=2)
    assert delta.export(store, chains.chain_of(store.load_all(), "c"), str(table)) == ["c"]
    assert rows(table) == left(FIRST + SECOND + THIRD)


def test_table_of_something_else_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    table = tmp_path / "table"
    delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))
    another = replace(full(store, "z", FIRST, hour=9), cluster="cluster-2")
    with pytest.raises(
        InvalidRequest, match="has snapshot b of cluster cluster-1, but z belongs to cluster-2; choose another"
    ):
        delta.export(store, [another], str(table))
    with pytest.raises(InvalidRequest, match="has snapshot b, which is later than a"):
        delta.export(store, chains.chain_of(store.load_all(), "a"), str(table))
    before = DeltaTable(str(table)).to_pyarrow_table()
    write_deltalake(str(table), before, mode="append")
    with pytest.raises(InvalidRequest, match="has versions that are not snapshots"):
        delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))


def test_of_two_at_once_one_adds_and_the_other_fails(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = str(tmp_path / "table")
    chain = chains.chain_of(store.load_all(), "b")
    delta.export(store, chain[:1], table)
    merge, both = DeltaTable.merge, threading.Barrier(2)

    def together(*args: Any, **more: Any) -> Any:
        both.wait(60)
        return merge(*args, **more)

    def add(_: int) -> list[str] | str:
        try:
            return delta.export(store, chain, table)
        except Unavailable as error:
            return str(error)

    monkeypatch.setattr(DeltaTable, "merge", together)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(add, range(2)))
    assert ["b"] in found
    (refused,) = (each for each in found if each != ["b"])
    assert refused[0:200].startswith(f"the table at {table} could not be read or written: Failed to commit")
    assert rows(Path(table)) == left(FIRST + SECOND)


def test_slow_call_does_not_set_the_table_back(store: DirectoryStore, tmp_path: Path) -> None:
    log = FIRST + SECOND + some_log(20, start=100)  # which changes keys of SECOND again
    incremental(store, "c", store.load("b"), log, hour=2)
    table = str(tmp_path / "table")
    chain = chains.chain_of(store.load_all(), "c")
    delta.export(store, chain[:1], table)
    others = list[list[str]]()

    def overtake(_: int) -> None:
        if not others:
            others.append(delta.export(store, chain, table))

    with pytest.raises(Unavailable, match="Failed to commit"):
        delta.export(store, chain[:2], table, overtake)
    assert others == [["b", "c"]]
    assert rows(Path(table)) == left(log)


def test_place_that_delta_cannot_reach_is_one_line(store: DirectoryStore) -> None:
    with pytest.raises(Unavailable, match=r"the table at nothing://x/y could not be read or written: Unknown scheme"):
        delta.export(store, [store.load("a")], "nothing://x/y")


def test_command_reports_the_partitions_it_added(store: DirectoryStore, tmp_path: Path) -> None:
    words = ["snapshot", "delta", str(store.root), str(tmp_path / "table")]
    answer = CliRunner().invoke(build(), words)
    assert (answer.exit_code, answer.output) == (0, f"{tmp_path}/table: at b, added a, b\n")
    answer = CliRunner().invoke(build(), words)
    assert (answer.exit_code, answer.output) == (0, f"{tmp_path}/table: at b, nothing to add\n")


def test_values_become_typed_columns(tmp_path: Path) -> None:
    """Through a full snapshot, a merge with deletes, and a value that does not match."""
    store, table = DirectoryStore(tmp_path / "typed"), str(tmp_path / "table")
    types = types_of({"keyType": "string", "valueType": "json", "valueSchema": "id BIGINT, name STRING"})
    log = [Change(b"k%d" % at, b'{"id": %d, "name": "n"}' % at, at + 1, EPOCH_MS + at) for at in range(20)]
    later = [Change(b"k0", None, 21, EPOCH_MS + 21), Change(b"k1", b'{"id": -1}', 22, EPOCH_MS + 22)]
    first = full(store, "a", log)
    delta.export(store, [first], table, types=types)
    second = incremental(store, "b", first, log + later)
    delta.export(store, [first, second], table, types=types)
    rows = {row["key"]: row["value"] for row in DeltaTable(table).to_pyarrow_table().to_pylist()}
    assert len(rows) == 19
    assert (rows["k1"], rows["k2"]) == ({"id": -1, "name": None}, {"id": 2, "name": "n"})
    third = incremental(store, "c", second, [*log, *later, Change(b"k3", b"{}x", 23, EPOCH_MS + 23)], hour=2)
    with pytest.raises(InvalidRequest, match="expected a value that matches the schema"):
        delta.export(store, [first, second, third], table, types=types)
    assert len(DeltaTable(table).history()) == 2, "nothing of the snapshot was committed"


def test_protobuf_values_become_a_nested_column(tmp_path: Path) -> None:
    store, table = DirectoryStore(tmp_path / "typed"), tmp_path / "table"
    shop = described(tmp_path, SHOP, "--include_imports")
    order = message_at(shop)(id=7, lines=[{"count": 2}], by_name={"a": {"count": 3}})
    log = [Change(b"k", order.SerializeToString(), 1, EPOCH_MS)]
    first = full(store, "a", log)
    incremental(store, "b", first, [*log, Change(b"k", b"", 2, EPOCH_MS + 1)])
    words = ["snapshot", "delta", str(store.root), str(table), "--value-type", "protobuf"]
    words += ["--value-schema-file", str(shop), "--value-message", "shop.Order"]
    done = CliRunner().invoke(build(["snapshots"]), words)
    assert done.exit_code == 0, done.output
    found = [DeltaTable(str(table), version=version).to_pyarrow_table().to_pylist() for version in range(2)]
    assert [row["value"]["id"] for rows in found for row in rows] == [7, 0]
    assert found[0][0]["value"]["by_name"] == [("a", {"count": 3})]


def test_wrong_types_of_a_table_are_wrong_usage(store: DirectoryStore, tmp_path: Path) -> None:
    words = ["snapshot", "delta", str(store.root), str(tmp_path / "table"), "--value-type", "json"]
    done = CliRunner().invoke(build(["snapshots"]), words)
    assert (done.exit_code, "valueType json: expected valueSchema, got none" in done.output) == (2, True)
