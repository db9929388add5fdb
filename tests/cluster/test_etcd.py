"""A cluster whose metadata is in etcd: founded, asked, and struck as one with ZooKeeper is (test_kill.py). Real
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
    test_a_leader_killed_costs_its_partitions_a_moment_and_the_others_nothing,
    test_a_leader_stopped_for_longer_than_its_session_serves_nothing_stale_when_it_wakes,
    test_a_node_told_to_stop_hands_over_and_its_clients_see_no_error,
    test_everything_killed_at_once_comes_back_with_everything,
    test_while_zookeeper_is_killed_or_stopped_everything_goes_on_and_no_leader_changes,
)
from tests.commands import kvstore

__all__ = [
    "cluster",
    "test_a_leader_killed_costs_its_partitions_a_moment_and_the_others_nothing",
    "test_a_leader_stopped_for_longer_than_its_session_serves_nothing_stale_when_it_wakes",
    "test_a_node_told_to_stop_hands_over_and_its_clients_see_no_error",
    "test_everything_killed_at_once_comes_back_with_everything",
    "test_while_zookeeper_is_killed_or_stopped_everything_goes_on_and_no_leader_changes",
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


def test_what_is_founded_in_etcd_takes_writes_and_is_checked_by_commands_that_are_told_where_it_is(
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
