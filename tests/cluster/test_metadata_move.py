"""A cluster that was founded with ZooKeeper continues with etcd: its metadata moves by a file, its bookies stay. Real
processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.devcluster.etcd import EtcdProcess
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore
from tests.etcd_fixture import own_etcd

__all__ = ["own_etcd"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as started:
        yield started


def name_store(config: Path, uri: str) -> None:
    """Name the store in a node's file, in place of its ZooKeeper."""
    text, count = re.subn(r"^zookeeper = .*\n", "", config.read_text(), flags=re.MULTILINE)
    assert count == 1
    config.write_text(f'{text}\n[metadata]\nuri = "{uri}"\n')


def test_cluster_keeps_every_key_when_moved_from_zookeeper_to_etcd(
    cluster: Cluster, own_etcd: EtcdProcess, tmp_path: Path
) -> None:
    file, old, new = tmp_path / "metadata", cluster.file.zookeeper, f"etcd://{own_etcd.address}/moved"
    cluster.redis("n1").mset({f"k{number}": number for number in range(200)})
    refused = kvstore("cluster", "metadata", "export", str(file), "--metadata", old)
    assert (refused.returncode, file.exists()) == (1, False)
    assert "belongs to a running process: stop every node" in refused.stderr
    for node in cluster.ids:
        cluster.terminate(node)
    told: list[Done] = []

    def exported() -> bool:
        told.append(kvstore("cluster", "metadata", "export", str(file), "--metadata", old, "--json"))
        return told[-1].returncode == 0

    cluster.wait_until(exported, "the sessions are over")
    cluster.kill_zookeeper()
    imported = kvstore("cluster", "metadata", "import", str(file), "--metadata", new, "--json")
    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout) == json.loads(told[-1].stdout)
    again = kvstore("cluster", "metadata", "import", str(file), "--metadata", new)
    assert again.returncode == 1
    assert "expected an empty place, got a cluster" in again.stderr
    for node in cluster.ids:
        name_store(Path(cluster.file.node(node).config), new)
        cluster.start_node(node)
    cluster.wait_ready()
    found = cluster.redis("n2").mget([f"k{number}" for number in range(200)])
    assert found == [b"%d" % number for number in range(200)]
    assert cluster.redis("n3").set("after", "the move") is True
    cluster.wait_until(lambda: kvstore("fsck", "--metadata", new).returncode == 0, "no error is found")
