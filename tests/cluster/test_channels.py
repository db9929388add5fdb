"""Pub/Sub over the nodes of a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), partitions=3) as started:
        yield started


def subscribed(cluster: Cluster, node: str, protocol: int, **names: str) -> redis.client.PubSub:
    """Return a client of the node that is subscribed to a channel and a pattern."""
    found = cluster.redis(node, protocol=protocol).pubsub()
    found.subscribe(names["channel"])
    found.psubscribe(names["pattern"])
    for _ in range(2):
        assert found.get_message(timeout=10)["type"] in ("subscribe", "psubscribe")
    return found


def received(client: redis.client.PubSub, count: int) -> list[bytes]:
    """Return the data of the next messages of the channel, each of which also comes for the pattern."""
    found = []
    while len(found) < 2 * count:
        message = client.get_message(timeout=10)
        assert message is not None, f"got only {found}"
        found.append((message["type"], message["data"]))
    assert found[1::2] == [("pmessage", data) for _, data in found[::2]]
    return [data for kind, data in found if kind == "message"]


def test_message_published_at_any_node_reaches_subscribers_at_every_node(cluster: Cluster) -> None:
    clients = [
        subscribed(cluster, node, protocol, channel="news", pattern="n*") for node in cluster.ids for protocol in (2, 3)
    ]
    publishers = [cluster.redis(node) for node in cluster.ids]
    for publisher in publishers:
        assert publisher.publish("news", "warm") == 4  # the subscriptions at its own node
    for client in clients:
        received(client, 3)
    for number in range(200):
        publishers[number % 3].publish("news", number)
    for client in clients:
        seen = list(map(int, received(client, 200)))
        assert sorted(seen) == list(range(200))  # each exactly once
        for first in range(3):  # in the order of each publisher
            assert [each for each in seen if each % 3 == first] == list(range(first, 200, 3))


def test_transaction_publishes_after_its_writes_at_every_node(cluster: Cluster) -> None:
    clients = {node: subscribed(cluster, node, 2, channel="done", pattern="don?") for node in cluster.ids}
    for number in range(30):
        with cluster.redis(cluster.ids[number % 3]).pipeline() as pipe:
            pipe.set("task", number).publish("done", number).execute()
        for node, client in clients.items():
            assert received(client, 1) == [b"%d" % number]
            assert cluster.redis(node).get("task") == b"%d" % number


def test_messages_continue_after_the_death_of_a_node(cluster: Cluster) -> None:
    alive, dead = cluster.ids[0], cluster.ids[2]
    client = subscribed(cluster, cluster.ids[1], 3, channel="beat", pattern="b*")
    cluster.kill(dead)
    publisher = cluster.redis(alive)
    began = time.monotonic()
    for number in range(50):
        publisher.publish("beat", number)
    assert received(client, 50) == [b"%d" % number for number in range(50)]
    assert time.monotonic() - began < 10  # nothing waits for the dead node
    cluster.start()
    cluster.wait_led()
    again = subscribed(cluster, dead, 2, channel="beat", pattern="b*")

    def has_heard() -> bool:
        publisher.publish("beat", "again")
        message = again.get_message(timeout=1)
        return message is not None and message["data"] == b"again"

    cluster.wait_until(has_heard, "a message reaches the restarted node")


def test_paused_node_delays_no_publisher(cluster: Cluster) -> None:
    client = subscribed(cluster, cluster.ids[1], 3, channel="beat", pattern="b*")
    publisher = cluster.redis(cluster.ids[0])
    cluster.pause(cluster.ids[2])
    try:
        took = []
        for number in range(200):
            began = time.monotonic()
            publisher.publish("beat", number)
            took.append(time.monotonic() - began)
        assert received(client, 200) == [b"%d" % number for number in range(200)]
        assert sorted(took)[180] < 0.5
    finally:
        cluster.resume(cluster.ids[2])
