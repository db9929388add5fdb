"""Replicas change machines, and partitions join and leave, by the operators' commands. Real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS = {f"key{number}": f"value {number}" for number in range(2_000)}
REPAIR_AFTER_S = 4.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes for three replicas. A lost node's replicas are recreated soon."""
    settings = (f"repair_after_s={REPAIR_AFTER_S}",)
    with running_cluster(tmp_path_factory.mktemp("replicas"), nodes=4, partitions=2, settings=settings) as started:
        started.redis("n1").mset(KEYS)
        yield started


def document(cluster: Cluster, *arguments: str) -> Any:
    answer = kvstore(*arguments, "--data-dir", str(cluster.local.data_dir), "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def replicas(cluster: Cluster) -> dict[str, set[str]]:
    return {each["id"]: set(each["replicas"]) for each in document(cluster, "ring", "show")["partitions"]}


def all_is_there(cluster: Cluster, node: str) -> None:
    found = cluster.redis(node).mget(list(KEYS))
    assert found == [value.encode() for value in KEYS.values()]


def test_drained_node_has_no_replicas_and_can_be_stopped(cluster: Cluster) -> None:
    drained = document(cluster, "node", "drain", "n1")
    assert drained["replicas_left"] is None
    assert replicas(cluster) == {"p1": {"n2", "n3", "n4"}, "p2": {"n2", "n3", "n4"}}
    cluster.terminate("n1")
    cluster.wait_led()
    all_is_there(cluster, "n2")
    cluster.start_node("n1")
    assert document(cluster, "node", "undrain", "n1")["draining"] == []
    cluster.wait_ready("n1")


def test_replica_moves_to_the_named_server(cluster: Cluster) -> None:
    assert document(cluster, "partition", "move-replica", "p1", "n3", "n1")["replacing"] == []
    assert replicas(cluster)["p1"] == {"n1", "n2", "n4"}
    all_is_there(cluster, "n1")


def test_replicas_of_a_lost_node_are_recreated_on_another(cluster: Cluster) -> None:
    cluster.kill("n2")
    cluster.wait_until(
        lambda: all(found == {"n1", "n3", "n4"} for found in replicas(cluster).values()),
        "every partition has three replicas again",
    )
    cluster.wait_led()
    all_is_there(cluster, "n3")
    cluster.start_node("n2")
    cluster.wait_ready("n2")


def test_every_key_stays_while_partitions_join_and_leave(cluster: Cluster) -> None:
    shown = document(cluster, "ring", "add", "--count", "2", "--dry-run")
    assert shown["version"] is None
    assert set(replicas(cluster)) == {"p1", "p2"}
    assert abs(shown["keys"] - len(KEYS) / 2) < len(KEYS) / 10
    document(cluster, "ring", "add", "--count", "2", "--wait")
    all_is_there(cluster, "n4")
    assert set(replicas(cluster)) == {"p1", "p2", "p3", "p4"}
    assert document(cluster, "ring", "plan")["balance"] <= 1.05
    document(cluster, "ring", "remove", "p1", "p4", "--wait")
    all_is_there(cluster, "n1")
    cluster.wait_until(lambda: set(replicas(cluster)) == {"p2", "p3"}, "what has retired is gone")
    assert document(cluster, "ring", "status")["moves"] == []
    owners = {each["partition"] for each in document(cluster, "ledger", "list")}
    assert owners == {"p1", "p2", "p3", "p4"}, "logs of retired partitions are kept for readers of their feeds"


def test_undrained_node_gets_its_share_of_replicas_again(cluster: Cluster) -> None:
    document(cluster, "node", "drain", "n1")
    assert all("n1" not in each for each in replicas(cluster).values())
    document(cluster, "node", "undrain", "n1")
    cluster.wait_ready("n1")
    done = document(cluster, "partition", "even-replicas")
    assert {each["newcomer"] for each in done["moved"]} == {"n1"}
    assert max(done["replicas"].values()) - min(done["replicas"].values()) <= 1
    assert any("n1" in each for each in replicas(cluster).values())
    all_is_there(cluster, "n1")
    assert document(cluster, "partition", "even-replicas")["moved"] == []


def test_cluster_is_consistent_after_all_replica_changes(cluster: Cluster) -> None:
    cluster.wait_succeeds("fsck")
