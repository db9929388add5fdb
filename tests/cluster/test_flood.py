"""Idle connections use as many of a node's descriptors as they may. The node continues to journal and to serve its
clients, and accepts new clients when the idle connections are gone."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import redis

from kvstore.server.config import Limits
from tests.cluster.harness import Cluster, running_cluster

pytestmark = [pytest.mark.cluster]

FILES = 600
"""Number of descriptors that the node may have."""
CROWD = 900
VALUE = b"x" * 100_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose journals roll at each MiB, and which bounds gRPC's connections like a node that starts with
    this few descriptors. gRPC accepts connections itself and does not count descriptors."""
    grpc_connections = Limits().within(FILES).grpc_connections_max
    settings = (
        "storage.segment_bytes=1048576",
        "storage.scrub_first_s=1",
        f"limits.grpc_connections_max={grpc_connections}",
    )
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as found:
        yield found


@contextmanager
def crowd(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Open this many idle connections."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.settimeout(0.2)
        with suppress(OSError):
            each.connect(address)
    yield sockets
    for each in sockets:
        each.close()


def segments(cluster: Cluster, node: str) -> int:
    return int(cluster.status(node)["bookie"]["segments"])


def is_served(cluster: Cluster, node: str) -> bool:
    with suppress(redis.RedisError, OSError):
        return bool(cluster.redis(node, socket_timeout=5).ping())
    return False


@pytest.mark.parametrize("endpoint", ["resp", "bookie", "http", "grpc"])
def test_idle_connections_take_no_descriptors_from_files(cluster: Cluster, endpoint: str) -> None:
    pid = cluster.pid("n1")
    client = cluster.redis("n1", socket_timeout=30)
    client.set("before", b"1")
    before = segments(cluster, "n1")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    with crowd(cluster.address("n1", endpoint), CROWD):
        for number in range(60):
            client.set(f"during-{number}", VALUE)
        cluster.wait_until(lambda: psutil.Process(pid).cpu_percent(0.5) < 75, "the loop does not spin")
        if endpoint != "http":  # who comes there last takes the place of the first
            cluster.wait_until(lambda: segments(cluster, "n1") > before + 2, "the journal rolls")
            assert not cluster.status("n1")["bookie"]["readonly"]
        assert psutil.Process(pid).num_fds() < FILES
    assert [client.get(f"during-{number}") for number in range(60)] == [VALUE] * 60
    cluster.wait_until(lambda: is_served(cluster, "n1"), "new clients are let in")
    cluster.wait_until(lambda: segments(cluster, "n1") > before + 2, "the journal has rolled")
    assert cluster.pid("n1") == pid
    assert cluster.is_running("n1")
