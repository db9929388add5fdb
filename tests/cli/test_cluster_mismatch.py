"""Commands for a folder whose cluster is down while another cluster listens at its ports: partitions and servers of
both have the same names, and the other one is not changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cli import cluster, data, partitions, ring_changes
from kvstore.cli.cluster import ClusterOptions, Tools, with_tools
from kvstore.cli.endpoints import config_of
from kvstore.client import AsyncClient, Client
from kvstore.devcluster import local
from kvstore.devcluster.layout import UpOptions, plan
from kvstore.errors import ConfigError, Unavailable
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.spark.cluster import find
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread
from tests.waiting import PATIENCE_S, wait_until_blocking

OURS, THEIRS = "ours", "theirs"
IS_OTHER = "expected a server of cluster ours, got one of theirs"


@pytest.fixture
def theirs() -> Iterator[Servers]:
    with serving_in_a_thread(ModelCluster(id=THEIRS)) as servers:
        yield servers


def folder(path: Path, servers: Servers, *, instance: str | None = OURS) -> ClusterOptions:
    """Return the configuration of a cluster whose servers listened at the ports of these."""
    addresses = sorted(each.grpc for each in servers.cluster.endpoints.values())
    document: dict[str, Any] = {"nodes": [{"grpc": each} for each in addresses], "zookeeper": "127.0.0.1:1/kvstore"}
    (path / "cluster.json").write_text(json.dumps(document | ({} if instance is None else {"instance": instance})))
    return ClusterOptions(path)


def wait_refused(work: Callable[[], object]) -> None:
    """Return once the command is refused because of the other cluster; raise AssertionError if it is ever done. A
    server that does not answer within half a second is not asked again, and its cluster stays unknown."""

    def is_refused() -> bool:
        with pytest.raises(Unavailable) as refused:
            work()
        return IS_OTHER in str(refused.value)

    wait_until_blocking(is_refused, what=IS_OTHER)


def test_no_key_of_another_cluster_is_written(tmp_path: Path, theirs: Servers) -> None:
    place = folder(tmp_path, theirs)
    wait_refused(lambda: data.put("k", "1", cluster=place, timeout=0.5))
    with Client(theirs.patient_url) as client:
        assert client.get(b"k") is None


def test_neither_client_takes_another_cluster_than_the_one_that_is_meant(tmp_path: Path, theirs: Servers) -> None:
    config = config_of(folder(tmp_path, theirs), 0.5)

    async def open_async() -> None:
        async with AsyncClient(config):
            pass

    for open_client in (Client(config).open, lambda: asyncio.run(open_async())):
        wait_refused(open_client)


@pytest.mark.parametrize("instance", [THEIRS, "", None])
def test_folder_whose_cluster_it_is_or_that_does_not_say_is_served(
    tmp_path: Path, theirs: Servers, instance: str | None
) -> None:
    data.put("k", "1", cluster=folder(tmp_path, theirs, instance=instance), timeout=PATIENCE_S)
    with Client(theirs.patient_url) as client:
        found = client.get(b"k")
    assert found is not None
    assert found.value == b"1"


def test_no_ring_of_another_cluster_is_changed_and_no_pin_is_listed(tmp_path: Path, theirs: Servers) -> None:
    place = folder(tmp_path, theirs)
    with pytest.raises(Unavailable, match=IS_OTHER):
        ring_changes.pause(cluster=place)
    with pytest.raises(Unavailable, match=IS_OTHER):
        partitions.unpin("x", cluster=place)


def test_another_way_to_name_a_cluster_counts_for_more_than_the_folder(tmp_path: Path, theirs: Servers) -> None:
    server = min(each.grpc for each in theirs.cluster.endpoints.values())
    assert config_of(replace(folder(tmp_path, theirs), server=server), 1.0).cluster == ""


def test_no_task_of_spark_writes_to_another_cluster(tmp_path: Path, theirs: Servers) -> None:
    options = {"dataDir": str(folder(tmp_path, theirs).data_dir), "timeout": "0.5s"}
    wait_refused(lambda: find(options))
    folder(tmp_path, theirs, instance=THEIRS)
    assert find({"dataDir": options["dataDir"]}).cluster == THEIRS


def test_metadata_of_another_cluster_is_left_alone(
    tmp_path: Path, theirs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, worked = MemoryStore(), []

    @asynccontextmanager
    async def tools(_: str) -> AsyncIterator[Tools]:
        nothing: Any = None
        yield Tools(nothing, store)

    async def reachable(address: str) -> str:
        return address

    async def work(_: Tools) -> None:
        worked.append(1)

    monkeypatch.setattr(cluster, "_tools", tools)
    monkeypatch.setattr(cluster, "_reachable", reachable)
    place = folder(tmp_path, theirs)
    with pytest.raises(ConfigError, match="holds no cluster"):
        with_tools(place, work)
    asyncio.run(LayoutStore(store).ensure(THEIRS))
    with pytest.raises(
        Unavailable, match=r"the metadata store at 127.0.0.1:1/kvstore .*another cluster: expected ours, got theirs"
    ):
        with_tools(place, work)
    assert worked == []
    for instance in (THEIRS, ""):
        with_tools(folder(tmp_path, theirs, instance=instance), work)
    with_tools(replace(folder(tmp_path, theirs), metadata="127.0.0.1:1/kvstore"), work)
    assert worked == [1, 1, 1]


class Up(local.LocalCluster):
    """A cluster whose processes are not started."""

    def _own_store_or_none(self, cluster: Any) -> Any:
        return SimpleNamespace(is_ready=lambda: True)

    def _spawn(self, name: str, command: list[str]) -> int:
        return 1 << 30


def test_up_notes_which_cluster_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def connect(*_: Any, **__: Any) -> MemoryStore:
        return store

    async def close() -> None:
        """The port is used again."""

    monkeypatch.setattr(local, "connect", connect)
    monkeypatch.setattr(store, "close", close)
    up = Up(tmp_path)
    for _ in range(2):
        up._start(plan(UpOptions(data_dir=tmp_path), None))
        assert up.load().instance == asyncio.run(LayoutStore(store).instance_id())
        assert all(node.pid == 1 << 30 for node in up.load().nodes)
