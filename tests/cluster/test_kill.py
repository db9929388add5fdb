"""Processes of a real cluster are killed, paused and restarted under load. No acknowledged write is lost, and the
others continue.

Counters show this: if every acknowledged INCR is counted and no refused one, a counter ends between the number of
acknowledged INCRs and that number plus those with an unknown outcome.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import redis

from kvstore.ring.builder import new_ring
from kvstore.ring.hashing import hash_named
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.pulse import pulsing

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GAP_S_MAX = 1.5
"""Longest time without an acknowledged write after a leader dies (docs/how-to/when-something-dies.md), if the processes
are not short of processors. `make drill-counts` takes the median of ten."""
REST_S = 0.01
"""Pause of a counter between two increments. Without it, the counters use the processors that a takeover needs."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The cluster, complete again after the previous test."""
    started.start()
    started.wait_led()
    return started


class Counter:
    """Increments one key through one node, and records the replies."""

    ANSWER_S = 10.0
    """Longest wait for an answer."""

    def __init__(self, cluster: Cluster, key: str, node: str) -> None:
        self.key, self.node = key, node
        self.acknowledged: list[float] = []
        """Time of each acknowledgement."""
        self.unknown = 0
        self.refused: list[str] = []
        self._cluster = cluster

    def run(self, over: threading.Event) -> None:
        client = self._cluster.redis(self.node, socket_timeout=self.ANSWER_S)
        while not over.is_set():
            try:
                client.incr(self.key)
                self.acknowledged.append(time.monotonic())
                over.wait(REST_S)
            except redis.ConnectionError:
                self.unknown += 1
                over.wait(0.05)
            except redis.TimeoutError:
                self.unknown += 1
            except redis.ResponseError as error:
                if str(error).startswith("UNKNOWN"):
                    self.unknown += 1
                else:
                    self.refused.append(str(error))

    @property
    def longest_gap(self) -> tuple[float, float]:
        """Return the begin and end of the longest time without an acknowledgement."""
        return max(itertools.pairwise(self.acknowledged), key=lambda gap: gap[1] - gap[0])

    def has_gone_on_since(self, moment: float) -> bool:
        return bool(self.acknowledged) and self.acknowledged[-1] > moment


def ring_of(cluster: Cluster) -> Ring:
    """Return the ring of the founded cluster."""
    partitions = [PartitionId(f"p{i + 1}") for i in range(cluster.file.partitions)]
    return new_ring(
        partitions,
        {ServerId(node): "" for node in cluster.ids},
        cluster.file.replicas,
        hash_named(cluster.file.key_hash),
    )


def wait_led_for_good(cluster: Cluster) -> dict[str, str]:
    """Wait until each partition is led by its preferred server: others hand back after some seconds. Return the
    leaders."""
    preferred = {str(name): str(each.replicas[0]) for name, each in ring_of(cluster).partitions.items()}
    cluster.wait_until(lambda: cluster.leaders() == preferred, "the preferred replicas lead")
    return preferred


def keys_of(cluster: Cluster, name: str) -> dict[str, str]:
    """Return a key of each partition that no other test uses."""
    ring = ring_of(cluster)
    found: dict[str, str] = {}
    for number in range(1000):
        key = f"{name}-{number}"
        found.setdefault(ring.partition_of(key.encode()), key)
    return found


@contextmanager
def counting(cluster: Cluster, name: str, *nodes: str) -> Iterator[dict[str, Counter]]:
    """Run a counter per partition, on the nodes in turn, and compare it at the end with the stored value."""
    counters = {
        partition: Counter(cluster, key, nodes[place % len(nodes)])
        for place, (partition, key) in enumerate(sorted(keys_of(cluster, name).items()))
    }
    with beside(*(counter.run for counter in counters.values())):
        for counter in counters.values():
            cluster.wait_until(lambda counter=counter: len(counter.acknowledged) > 20, f"{counter.key} is counted")
        yield counters
    cluster.wait_led()
    for counter in counters.values():
        stored = int(cluster.redis(counter.node).get(counter.key) or 0)
        told = len(counter.acknowledged)
        assert told <= stored <= told + counter.unknown, f"{counter.key}: {counter.unknown} of unknown outcome"


def wait_going_on(cluster: Cluster, counters: dict[str, Counter]) -> None:
    moment = time.monotonic()
    for counter in counters.values():
        cluster.wait_until(lambda counter=counter: counter.has_gone_on_since(moment), f"{counter.key} is counted on")


def proven_ends(cluster: Cluster) -> int:
    """Return the number of takeovers that waited for no lease because the former leader's end was proven."""
    logs = (cluster.directory / "data" / "logs").glob("*.log")
    return sum(log.read_text().count("the former leader's process has ended") for log in logs)


# docs/protocol.md G28
def test_killed_leader_interrupts_only_its_own_partitions(cluster: Cluster) -> None:
    leaders = wait_led_for_good(cluster)
    victim = leaders["p1"]
    others = [node for node in cluster.ids if node != victim]
    proven = proven_ends(cluster)
    with pulsing() as pulse, counting(cluster, "leader", *others) as counters:
        led = {partition for partition, node in leaders.items() if node == victim}
        cluster.kill(victim)
        wait_going_on(cluster, counters)
        assert proven_ends(cluster) == proven + len(led)
        gaps = {partition: counter.longest_gap for partition, counter in counters.items()}
        cluster.start_node(victim)
        cluster.wait_ready(victim)
        wait_going_on(cluster, counters)
    for partition, counter in counters.items():
        pulse.check(gaps[partition], GAP_S_MAX, partition)
        assert counter.refused == [], partition
        assert counter.unknown <= (1 if partition in led else 0), f"{partition}: one operation was under way"


def test_nothing_is_lost_when_every_node_is_killed_in_turn(cluster: Cluster) -> None:
    with counting(cluster, "turn", *cluster.ids) as counters:
        for node in cluster.ids:
            cluster.kill(node)
            cluster.wait_led(by_other_than=node)
            cluster.start_node(node)
            cluster.wait_ready(node)
            wait_going_on(cluster, counters)


def test_cluster_killed_at_once_restarts_with_all_data(cluster: Cluster) -> None:
    with counting(cluster, "all", *cluster.ids) as counters:
        cluster.kill_everything()
        cluster.start()  # fails unless everything serves again within its own deadline
        wait_going_on(cluster, counters)


def test_cluster_serves_without_a_leader_change_while_zookeeper_is_down(cluster: Cluster) -> None:
    leaders = wait_led_for_good(cluster)
    with counting(cluster, "zookeeper", *cluster.ids) as counters:
        cluster.kill_zookeeper()
        for _ in range(5):
            wait_going_on(cluster, counters)
        cluster.start_zookeeper()
        wait_going_on(cluster, counters)
        cluster.pause_zookeeper()
        for _ in range(5):
            wait_going_on(cluster, counters)
        cluster.resume_zookeeper()
        wait_going_on(cluster, counters)
    for partition, counter in counters.items():
        assert counter.refused == [], partition
        assert counter.unknown == 0, partition
    assert cluster.wait_led() == leaders


def test_leader_paused_beyond_its_session_serves_nothing_stale(cluster: Cluster) -> None:
    victim = cluster.wait_led()["p1"]
    other = next(node for node in cluster.ids if node != victim)
    key = keys_of(cluster, "stopped")["p1"]
    cluster.redis(victim).set(key, "old")
    proven = proven_ends(cluster)
    asked = threading.Event()

    def ask() -> object:
        connection = cluster.redis(victim, socket_timeout=20)
        asked.set()
        try:
            return connection.get(key)
        except redis.RedisError as error:
            return error

    with ThreadPoolExecutor(1) as threads:
        cluster.pause(victim)
        try:
            cluster.wait_until(lambda: _try_set(cluster, other, key, "new"), "another node leads p1")
            asking = threads.submit(ask)
            asked.wait()
        finally:
            cluster.resume(victim)
        answer = asking.result()
    assert answer == b"new" or isinstance(answer, redis.RedisError), "refused, or answered by who leads now"
    assert proven_ends(cluster) == proven, "a stopped process has not ended"
    cluster.wait_ready()
    assert [cluster.redis(node).get(key) for node in cluster.ids] == [b"new"] * 3


def _try_set(cluster: Cluster, node: str, key: str, value: str) -> bool:
    try:
        return bool(cluster.redis(node).set(key, value))
    except redis.RedisError:
        return False


def test_stopping_node_hands_over_without_errors_for_clients(cluster: Cluster) -> None:
    victim = cluster.wait_led()["p1"]
    others = [node for node in cluster.ids if node != victim]
    with counting(cluster, "handover", *others) as counters:
        cluster.terminate(victim)
        wait_going_on(cluster, counters)
        cluster.start_node(victim)
        cluster.wait_ready(victim)
    for partition, counter in counters.items():
        assert (counter.refused, counter.unknown) == ([], 0), partition
