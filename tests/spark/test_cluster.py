"""The addresses of a cluster, from the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError, MetadataUnavailable, NoSuchNode, Unavailable
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Stat
from kvstore.meta.zookeeper.store import ZooKeeperStore
from kvstore.server.cluster.addresses import addresses
from kvstore.server.cluster.topology import Member
from kvstore.spark.cluster import find


class Leaving(MemoryStore):
    """A server stops after its name was listed."""

    async def get(self, path: str) -> tuple[bytes, Stat]:
        if path == f"{paths.SERVERS}/n1":
            raise NoSuchNode(path)
        return await super().get(path)


async def test_server_that_goes_down_just_now_is_left_out() -> None:
    store = Leaving()
    await store.create(paths.SERVERS)
    for name in ("n1", "n2"):
        await store.create(f"{paths.SERVERS}/{name}", Member(id=name, resp="", grpc=f"{name}:7401").encode())
    assert await addresses(store) == ("n2:7401",)


async def test_notebook_whose_thread_has_a_loop_can_name_a_zookeeper(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(address: str, **_options: object) -> MemoryStore:
        raise MetadataUnavailable(address)

    monkeypatch.setattr(ZooKeeperStore, "connect", connect)
    with pytest.raises(Unavailable, match=r"^zookeeper: z:2181 does not answer: z:2181$"):
        find({"zookeeper": "z:2181"})
    with pytest.raises(
        ConfigError, match=r"^zookeeper: expected host:port,host:port/chroot, or etcd:// before it, got 'z'$"
    ):
        find({"zookeeper": "z"})


def test_directory_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^dataDir: .*/data/cluster.json: Not a directory$"):
        find({"dataDir": str(tmp_path / "data")})
