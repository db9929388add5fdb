"""A chain of snapshots as a Delta table: what was there at each of them is a version of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from kvstore.cli.main import build
from kvstore.errors import InvalidRequest
from kvstore.spark.snapshots import chains, delta
from kvstore.spark.snapshots.directory import DirectoryStore
from tests.spark.snapshots.made import Change, full, incremental, some_log

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


def test_each_snapshot_is_a_version_and_the_next_adds_only_what_came_since(
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


def test_a_table_of_something_else_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    table = tmp_path / "table"
    delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))
    full(store, "z", FIRST, hour=9)
    with pytest.raises(InvalidRequest, match="is at snapshot b, which z does not stand on: give another place"):
        delta.export(store, chains.chain_of(store.load_all(), "z"), str(table))
    with pytest.raises(InvalidRequest, match="is at snapshot b, which a does not stand on"):
        delta.export(store, chains.chain_of(store.load_all(), "a"), str(table))
    before = DeltaTable(str(table)).to_pyarrow_table()
    write_deltalake(str(table), before, mode="append")
    with pytest.raises(InvalidRequest, match="has versions that are no snapshot's"):
        delta.export(store, chains.chain_of(store.load_all(), "b"), str(table))


def test_the_command_tells_what_it_added(store: DirectoryStore, tmp_path: Path) -> None:
    words = ["snapshot", "delta", str(store.root), str(tmp_path / "table")]
    answer = CliRunner().invoke(build(), words)
    assert (answer.exit_code, answer.output) == (0, f"{tmp_path}/table: at b, added a, b\n")
    answer = CliRunner().invoke(build(), words)
    assert (answer.exit_code, answer.output) == (0, f"{tmp_path}/table: at b, nothing to add\n")
