"""A leader that reaches everybody, but that nobody reaches at its advertised address, loses the lead in time,
although its session lives. Real processes, behind relays at their advertised addresses."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Iterator

import pytest
import redis

from kvstore.meta.address import MetadataKind
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.pulse import pulsing
from tests.cluster.test_kill import wait_led_for_good
from tests.cluster.unfit.relay import Relays, running_relays

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GAP_S_MAX = 10.0
ENDPOINTS = ("resp", "grpc", "http", "bookie")


def host_of(node: str) -> str:
    """Return the host that the node advertises."""
    return f"127.0.9.{node.removeprefix('n')}"


class Writing:
    """Writes one key through one node, and records the longest time without an acknowledgement."""

    def __init__(self, cluster: Cluster, node: str, key: str = "key") -> None:
        self._cluster, self._node, self.key = cluster, node, key
        self.gap = 0.0, 0.0
        """Begin and end of the longest time without an acknowledgement."""
        self.written = 0

    def run(self, over: threading.Event) -> None:
        client, last = self._cluster.redis(self._node), time.monotonic()
        while not over.wait(0.02):
            try:
                client.set(self.key, str(self.written))
            except redis.RedisError:
                pass
            else:
                last = self._acknowledged(last)
                self.written += 1
        self._acknowledged(last)

    def _acknowledged(self, last: float) -> float:
        """Record the time since the last acknowledgement. Return the time of this one."""
        now = time.monotonic()
        began, ended = self.gap
        if now - last > ended - began:
            self.gap = last, now
        return now


@pytest.fixture(scope="module", params=[MetadataKind.ZOOKEEPER, MetadataKind.ETCD])
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Relays]]:
    with running_relays() as relays:

        def behind_a_relay(node: str, text: str) -> str:
            said = tomllib.loads(text)
            relays.add(host_of(node), [int(said[endpoint].rpartition(":")[2]) for endpoint in ENDPOINTS])
            return f'advertise = "{host_of(node)}"\n{text}'

        directory = tmp_path_factory.mktemp("cluster")
        with running_cluster(directory, partitions=1, metadata=request.param, written=behind_a_relay) as cluster:
            cluster.wait_ready()
            yield cluster, relays


# docs/protocol.md P40
@pytest.mark.parametrize("way", ["swallow", "hang_up"])
def test_unreachable_leader_is_deposed_in_time_and_stays_deposed(setting: tuple[Cluster, Relays], way: str) -> None:
    cluster, relays = setting
    leader = wait_led_for_good(cluster)["p1"]  # another leader would hand the lead back meanwhile
    others = [node for node in cluster.ids if node != leader]
    writing = Writing(cluster, others[0])
    with pulsing() as pulse, beside(writing.run):
        cluster.wait_until(lambda: writing.written > 10, "writes")
        port = cluster.address(leader, "resp")[1]
        getattr(relays, way)(host_of(leader), port)
        successor = cluster.wait_led(by_other_than=leader)["p1"]
        written, epoch = writing.written, cluster.status(successor)["partitions"]["p1"]["leading"]["epoch"]
        cluster.wait_until(lambda: writing.written > written + 200, "writes by the successor")
        assert cluster.status(successor)["partitions"]["p1"]["leading"]["epoch"] == epoch, "the lead changes once"
    pulse.check(writing.gap, GAP_S_MAX, "writes")
    relays.pass_on(host_of(leader), port)
