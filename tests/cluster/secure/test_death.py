"""A leader that encrypts its connections is killed. Its death watch encrypts too, with the node's files. Real
processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.test_kill import proven_ends
from tests.cluster.test_tls import Secured, secured_cluster

pytestmark = [pytest.mark.cluster]


def led_by(secured: Secured, node: str) -> set[str]:
    """Return the partitions that the node leads."""
    partitions = json.loads(secured.https(node, "/") or b"{}").get("partitions", {})
    return {name for name, replica in partitions.items() if replica["role"] == "serving"}


def check_killed(secured: Secured, victim: str) -> None:
    """Kill the node, and check that none of its partitions waits for a lease."""
    cluster, led, proven = secured.cluster, led_by(secured, victim), proven_ends(secured.cluster)
    others = [node for node in cluster.ids if node != victim]
    cluster.kill(victim)
    cluster.wait_until(lambda: led <= set().union(*(led_by(secured, node) for node in others)), "others lead")
    assert proven_ends(cluster) == proven + len(led), cluster.last_words()
    cluster.start_node(victim)
    cluster.wait_until(lambda: led_by(secured, victim), f"{victim} leads again")


# docs/protocol.md G28
def test_killed_leader_is_followed_at_once_when_nodes_verify_clients(tmp_path: Path) -> None:
    with secured_cluster(tmp_path, "n1", "n2", "n3") as secured:
        cluster = secured.cluster
        cluster.wait_until(lambda: all(led_by(secured, node) for node in cluster.ids), "each node leads")
        for victim in cluster.ids:
            check_killed(secured, victim)
