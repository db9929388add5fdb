"""`up` when a metadata store ends during a request, and the nodes that it starts."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.devcluster import local
from kvstore.devcluster.layout import UpOptions, plan
from kvstore.errors import MetadataUnavailable
from kvstore.meta.memory import MemoryStore
from tests.waiting import PATIENCE_S


class Up(local.LocalCluster):
    """A cluster without processes whose store runs at first."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir)
        self.running: Any = SimpleNamespace(is_ready=lambda: True)
        self.store_starts = 0

    def _own_store_or_none(self, cluster: Any) -> Any:
        return self.running

    def start_zookeeper(self) -> int:
        self.store_starts += 1
        self.running = SimpleNamespace(is_ready=lambda: True)
        return 1 << 30

    def _spawn(self, name: str, command: list[str]) -> int:
        return 1 << 30


@pytest.mark.parametrize("ends", [True, False])
def test_up_restarts_a_store_only_if_it_ended_during_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A store that had received SIGTERM answered again, and `up` failed."""
    up = Up(tmp_path)

    async def connect(*_: Any, **__: Any) -> MemoryStore:
        if not up.store_starts:
            up.running = None if ends else up.running
            raise MetadataUnavailable("no ZooKeeper answers")
        return MemoryStore()

    monkeypatch.setattr(local, "connect", connect)
    if ends:
        up._start(plan(UpOptions(data_dir=tmp_path), None))
    else:
        with pytest.raises(MetadataUnavailable):
            up._start(plan(UpOptions(data_dir=tmp_path), None))
    assert up.store_starts == int(ends)


def test_node_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    """A program that a user had saved as `http.py` ran in each node, and no node started."""
    (tmp_path / "tomllib.py").write_text("raise SystemExit('a module of the current directory')\n")
    command = Up(tmp_path)._command(plan(UpOptions(data_dir=tmp_path), None).nodes[0])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("kvstore: ")
    assert "n1/node.toml" in done.stderr


def test_status_requests_the_pages_of_all_nodes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that hung delayed `kvstore status` by 4 s."""
    up, found = Up(tmp_path), plan(UpOptions(data_dir=tmp_path), None)
    together = threading.Barrier(2 * len(found.nodes), timeout=PATIENCE_S)

    def page(*_: object) -> None:
        together.wait()

    monkeypatch.setattr(up, "load", lambda: found)
    monkeypatch.setattr(up, "_runs", lambda _: True)
    monkeypatch.setattr(local, "http_ok", page)
    monkeypatch.setattr(local, "python_of", page)
    assert [node["python"] for node in up.status()["nodes"]] == [None, None, None]
