"""`kvstore cluster init` and `cluster metadata export` with an in-memory metadata store."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import cluster_init
from kvstore.cli.cluster import ClusterOptions
from kvstore.env.secret import read_secret
from kvstore.errors import ConfigError
from kvstore.meta import dump, paths, transfer
from kvstore.meta.memory import MemoryStore
from kvstore.ring import codec
from kvstore.types import PartitionId, ServerId
from tests.commands import Done, kvstore
from tests.ring.rings import new_ring

NODES = ("--node", "a", "--node", "b", "--node", "c")


class Reached:
    """Collects the clients that commands get when they reach the store."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    found = MemoryStore()

    def with_tools(cluster: ClusterOptions, work: Callable[[Any], Awaitable[Any]]) -> Any:
        assert cluster.metadata is not None
        if cluster.metadata.startswith("nowhere"):
            raise ConfigError("no such store")

        async def main() -> Any:
            return await work(Reached(found))

        return asyncio.run(main())

    monkeypatch.setattr(cluster_init, "with_tools", with_tools)
    return found


def init(secret: Path, *words: str, address: str = "zk:1/kv") -> Done:
    return kvstore("cluster", "init", "--metadata", address, "--secret-file", str(secret), *(words or NODES))


def test_cluster_that_is_there_gets_no_second_secret(store: MemoryStore, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert init(one).returncode == 0
    again = init(other)
    assert (again.returncode, other.exists()) == (1, False)
    assert f"its secret is not in {other}; copy it there from one of its nodes" in again.stderr
    same = init(one)
    assert (same.returncode, f"Its nodes must have the secret in {one}" in same.stdout) == (0, True)
    assert "Copy the file" not in same.stdout


def test_cluster_without_a_secret_gets_one_on_request(store: MemoryStore, tmp_path: Path) -> None:
    init(tmp_path / "lost")
    made = init(tmp_path / "new", "--new-secret", *NODES)
    assert (made.returncode, "Copy the file" in made.stdout) == (0, True)
    assert read_secret(tmp_path / "new") != read_secret(tmp_path / "lost")


def test_where_no_store_is_found_no_secret_is_made(store: MemoryStore, tmp_path: Path) -> None:
    assert init(tmp_path / "secret", address="nowhere:1/kv").returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_ring_that_has_moved_is_the_cluster_that_was_founded(store: MemoryStore, tmp_path: Path) -> None:
    """A job can run again with its original arguments after nodes were added."""
    init(tmp_path / "secret")
    moved = new_ring([PartitionId("p1")], {ServerId(each): "" for each in ("b", "c", "d")}, 3)
    asyncio.run(store.set(paths.RING, codec.encode(moved), 0))
    again = init(tmp_path / "secret")
    assert (again.returncode, "the cluster existed already" in again.stdout) == (0, True), again.stderr
    others = init(tmp_path / "secret", "--node", "x", "--node", "y", "--node", "z")
    assert (others.returncode, "with the nodes b, c, d" in others.stderr) == (1, True)


def test_exported_files_are_private_and_no_partial_export_remains(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export contains the passwords of all ledgers."""
    init(tmp_path / "secret")
    file, before = tmp_path / "export", os.umask(0o022)
    try:
        done = kvstore("cluster", "metadata", "export", str(file), "--metadata", "zk:1/kv")
    finally:
        os.umask(before)
    assert (done.returncode, stat.S_IMODE(file.stat().st_mode)) == (0, 0o600), done.stderr
    content = file.read_bytes()

    async def unused(_: Any) -> Any:
        raise AssertionError("read for nothing")

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "export", unused)
        again = kvstore("cluster", "metadata", "export", str(file), "--metadata", "zk:1/kv")
    assert (again.returncode, "File exists" in again.stderr, file.read_bytes()) == (1, True, content)

    def full(*_: Any) -> bytes:
        raise OSError("no space")

    monkeypatch.setattr(dump, "encode", full)
    assert kvstore("cluster", "metadata", "export", str(tmp_path / "half"), "--metadata", "zk:1/kv").returncode == 1
    assert not (tmp_path / "half").exists()
