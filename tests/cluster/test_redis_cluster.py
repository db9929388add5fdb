"""Real processes: redis-py's client for Redis Cluster sends every command to the leader of its key, before and after a
takeover and a change of the ring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.backoff import ConstantBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import MovedError, RedisError
from redis.retry import Retry

from tests.cluster.harness import Cluster, running_cluster
from tests.commands import kvstore

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEYS = 150
ROUNDS_MAX = 20
"""Rounds over all keys in which a client must have learned the new leaders."""


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("slots")
    with running_cluster(directory, partitions=3, settings=["redis.redirects=true"]) as cluster:
        cluster.wait_led()
        yield cluster


def client_of(cluster: Cluster) -> RedisCluster:
    nodes = [ClusterNode(*cluster.address(node, "resp")) for node in cluster.ids]
    return RedisCluster(startup_nodes=nodes, socket_timeout=10, retry=Retry(ConstantBackoff(0.5), 40))


def forwarded(cluster: Cluster) -> int:
    """Return the number of operations that running nodes have forwarded."""
    return sum(cluster.status(node)["server"]["forwarded_total"] for node in cluster.ids if cluster.is_running(node))


def write_and_read(client: RedisCluster, value: str) -> None:
    for number in range(KEYS):
        assert client.set(f"key:{number}", value)
        assert client.get(f"key:{number}") == value.encode()


def forwards_in_a_round(cluster: Cluster, client: RedisCluster, value: str) -> int:
    before = forwarded(cluster)
    write_and_read(client, value)
    return forwarded(cluster) - before


def wait_direct(cluster: Cluster, client: RedisCluster, what: str) -> None:
    """Write and read all keys in rounds, until a round is not forwarded at all. Raises AssertionError."""
    found = []
    for number in range(ROUNDS_MAX):
        try:
            found.append(forwards_in_a_round(cluster, client, f"{what} {number}"))
        except RedisError as error:  # the takeover may take longer than the client's patience
            found.append(str(error))
            continue
        if found[-1] == 0:
            return
    raise AssertionError(f"{what}: forwarded operations by round: {found}")


def owners(cluster: Cluster) -> set[str]:
    """Return the ports of the leaders of all slots, as CLUSTER SLOTS shows them."""
    return {str(primary[1]) for _, _, primary, *_ in cluster.redis(running(cluster)).cluster("SLOTS")}


def is_redirected(cluster: Cluster, number: int) -> bool:
    """Return True if n1 redirects a plain client to the leader of the key."""
    try:
        cluster.redis("n1").get(f"key:{number}")
    except MovedError:
        return True
    return False


def running(cluster: Cluster) -> str:
    return next(node for node in cluster.ids if cluster.is_running(node))


def test_cluster_client_reaches_leaders_directly(cluster: Cluster) -> None:
    cluster.wait_until(lambda: len(owners(cluster)) == 3, "each node leads a partition")
    client = client_of(cluster)
    wait_direct(cluster, client, "after the start")
    assert 0 < sum(is_redirected(cluster, number) for number in range(20)) < 20, "a plain client sees redirects"

    cluster.kill("n1")
    cluster.wait_led(by_other_than="n1")
    wait_direct(cluster, client, "after the takeover")
    assert str(cluster.address("n1", "resp")[1]) not in owners(cluster)

    cluster.start_node("n1")
    cluster.wait_ready()
    added = kvstore("ring", "add", "--count", "1", "--wait", "--data-dir", str(cluster.local.data_dir))
    assert added.returncode == 0, added.stderr
    wait_direct(cluster, client, "after ring add")
    client.close()
