"""What `up` does about a metadata store that ends while it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.devcluster import local
from kvstore.devcluster.layout import Wish, plan
from kvstore.errors import MetadataUnavailable
from kvstore.meta.memory import MemoryStore


class Up(local.LocalCluster):
    """A cluster without processes, whose store runs at first."""

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
    """A store that had received SIGTERM answered once more, and `up` failed."""
    up = Up(tmp_path)

    async def connect(*_: Any, **__: Any) -> MemoryStore:
        if not up.store_starts:
            up.running = None if ends else up.running
            raise MetadataUnavailable("no ZooKeeper answers")
        return MemoryStore()

    monkeypatch.setattr(local, "connect", connect)
    if ends:
        up._start(plan(Wish(data_dir=tmp_path), None))
    else:
        with pytest.raises(MetadataUnavailable):
            up._start(plan(Wish(data_dir=tmp_path), None))
    assert up.store_starts == int(ends)
