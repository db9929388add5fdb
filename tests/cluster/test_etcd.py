"""A cluster with metadata in etcd is founded, queried and killed, like one with ZooKeeper in test_kill.py. Real
processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.meta.address import MetadataKind
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_kill import (
    cluster,
    test_cluster_killed_at_once_restarts_with_all_data,
    test_cluster_serves_without_a_leader_change_while_zookeeper_is_down,
    test_killed_leader_interrupts_only_its_own_partitions,
    test_leader_paused_beyond_its_session_serves_nothing_stale,
    test_stopping_node_hands_over_without_errors_for_clients,
)
from tests.commands import kvstore

__all__ = [
    "cluster",
    "test_cluster_killed_at_once_restarts_with_all_data",
    "test_cluster_serves_without_a_leader_change_while_zookeeper_is_down",
    "test_killed_leader_interrupts_only_its_own_partitions",
    "test_leader_paused_beyond_its_session_serves_nothing_stale",
    "test_stopping_node_hands_over_without_errors_for_clients",
]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), metadata=MetadataKind.ETCD) as cluster:
        yield cluster


def said(*arguments: str) -> str:
    answer = kvstore(*arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_cluster_in_etcd_accepts_writes_and_commands_find_it(
    cluster: Cluster,
) -> None:
    address = cluster.file.zookeeper
    assert address.startswith("etcd://")
    cluster.redis("n1").set("greeting", "hello")
    assert [cluster.redis(node).get("greeting") for node in cluster.ids] == [b"hello"] * 3
    assert said("get", "greeting", "--metadata", address).strip() == "hello"
    by_server = ("--server", cluster.file.node("n2").grpc)
    assert len(json.loads(said("bookie", "list", "--json", *by_server))) == 3
    said("fsck", "--metadata", address)
    status: dict[str, Any] = {}

    def all_is_served() -> bool:
        answer = kvstore("status", "--json", "--data-dir", str(cluster.local.data_dir))
        status.update(json.loads(answer.stdout))
        return answer.returncode < 2

    cluster.wait_until(all_is_served, "all is served")
    pid = cluster.file.zookeeper_pid
    assert status["zookeeper"] == {"address": address, "own": True, "running": True, "pid": pid}
