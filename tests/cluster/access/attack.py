"""The parts of an attack by unauthenticated peers on every endpoint of a secured cluster: the cluster, the attackers,
and the load of clients, newcomers and probes meanwhile. A test asserts what holds on any machine
(test_attack_everywhere.py), and loadtest/bench/attacked.py measures latencies.
"""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPSConnection
from pathlib import Path

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.devcluster.local import secure_folder
from kvstore.devcluster.secure_folder import SecureFolder
from tests.beside import beside
from tests.cluster.harness import Cluster
from tests.source import ROOT
from tests.waiting import PATIENCE_S

LISTENERS = ("resp", "http", "bookie", "grpc")
COUNTED_LISTENERS = 3
"""Number of listeners of a node whose half-open connections and handshakes its metrics count. gRPC reports none."""
KEYS = [f"attacked-{number}" for number in range(60)]
HELD = 1_000
"""Number of connections of a node that wait for their TLS handshake or are in it, when two of the three listeners
that count them are full."""
LIMITS = (
    "limits.connections_max=400",
    "limits.http_connections_max=100",
    "limits.grpc_connections_max=400",
)
"""Limits that one attacking process can reach on three nodes."""


def folder_of(cluster: Cluster) -> SecureFolder:
    found = secure_folder(cluster.file)
    assert found is not None
    return found


def ca_of(cluster: Cluster) -> Path:
    return cluster.directory / "data" / "secure" / "ca.pem"


def redis_of(cluster: Cluster, node: str) -> redis.Redis:
    own, login = str(ca_of(cluster).with_name("client.pem")), folder_of(cluster).login()
    said = {"username": login.user, "password": login.password.decode()}
    tls = {"ssl": True, "ssl_ca_certs": str(ca_of(cluster)), "ssl_certfile": own, "ssl_keyfile": own}
    return cluster.redis(node, **tls, **said)


def url_of(cluster: Cluster) -> str:
    own, login = ca_of(cluster).with_name("client.pem"), folder_of(cluster).login()
    hosts = cluster.url.removeprefix("kv://")
    return f"kvs://{login.user}:{login.password.decode()}@{hosts}?ca={ca_of(cluster)}&cert={own}&key={own}"


def page(cluster: Cluster, node: str, path: str) -> int:
    """Request a page as a probe does, on its own connection. Return the status."""
    host, port = cluster.address(node, "http")
    context = ssl.create_default_context(cafile=str(ca_of(cluster)))
    with closing(HTTPSConnection(host, port, timeout=PATIENCE_S, context=context)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def probe(cluster: Cluster, path: str) -> None:
    """Request the path from the nodes that are not restarted."""
    assert [page(cluster, each, path) for each in ("n1", "n3")] == [200, 200]


def probe_grpc(cluster: Cluster) -> None:
    assert [grpc_health(cluster, each) for each in ("n1", "n3")] == [health_pb2.HealthCheckResponse.SERVING] * 2


def grpc_health(cluster: Cluster, node: str) -> int:
    own = ca_of(cluster).with_name("client.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(ca_of(cluster).read_bytes(), own, own)
    with grpc.secure_channel("{}:{}".format(*cluster.address(node, "grpc")), credentials) as channel:
        asked = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(asked, timeout=PATIENCE_S, wait_for_ready=True).status)


def run_on_spare_time(attack: subprocess.Popen[bytes]) -> None:
    """Let a process run only while others leave the processor idle. Attackers have their own machines, and their
    processor time is no part of the figures."""
    os.setpriority(os.PRIO_PROCESS, attack.pid, 19)
    with suppress(FileNotFoundError):  # a kernel without groups by session
        Path(f"/proc/{attack.pid}/autogroup").write_text("19")


@contextmanager
def attacked(cluster: Cluster) -> Iterator[None]:
    """Attack until the end of the `with`, which begins when the slots of all nodes are held."""
    addresses = ["{}={}:{}".format(name, *cluster.address(node, name)) for node in cluster.ids for name in LISTENERS]
    command = [sys.executable, "-m", "tests.cluster.access.attackers"]
    attacks = [
        subprocess.Popen([*command, what, str(ca_of(cluster)), *addresses], cwd=ROOT, start_new_session=True)
        for what in ("begin", "finish")
    ]
    try:
        # Three listeners count their half-open connections; gRPC does not tell its.
        opening = "process_connections_opening"
        cluster.wait_until(lambda: all(counted(cluster, each, opening) >= HELD for each in cluster.ids), "all is held")
        for each in attacks:
            run_on_spare_time(each)
        yield
        assert [each.poll() for each in attacks] == [None, None], "the attack lasts"
    finally:
        for each in attacks:
            each.send_signal(signal.SIGKILL)
            each.wait()


class Repeated:
    """Calls of one function again and again, with their durations and failures."""

    def __init__(self, call: Callable[[], object], rest_s: float) -> None:
        self._call, self._rest_s = call, rest_s
        self.took_s: list[float] = []
        self.failed: list[Exception] = []

    def run(self, over: threading.Event) -> None:
        while not over.wait(self._rest_s):
            began = time.monotonic()
            try:
                self._call()
            except (AssertionError, OSError, redis.RedisError, grpc.RpcError) as error:
                self.failed.append(error)
            else:
                self.took_s.append(time.monotonic() - began)


def gets_of(client: redis.Redis) -> Callable[[], object]:
    turn = iter(range(1 << 30))
    return lambda: client.get(KEYS[next(turn) % len(KEYS)])


def counted(cluster: Cluster, node: str, name: str) -> float:
    """Return the sum of a node's metric over all of its labels."""
    host, port = cluster.address(node, "http")
    own = ca_of(cluster).with_name("client.pem")
    context = ssl.create_default_context(cafile=str(ca_of(cluster)))
    context.load_cert_chain(own)
    with closing(HTTPSConnection(host, port, timeout=PATIENCE_S, context=context)) as connection:
        login = folder_of(cluster).login()
        connection.request("GET", "/metrics", headers={"Authorization": login.header})
        text = connection.getresponse().read().decode()
    lines = [line.split() for line in text.splitlines() if line.startswith(f"kvstore_{name}")]
    assert lines, f"{node} reports no {name}"
    return sum(float(words[-1]) for words in lines)


class Load:
    """The load before and during the attack."""

    def __init__(self, cluster: Cluster, client: redis.Redis) -> None:
        def newcomer() -> None:
            with closing(redis_of(cluster, "n1")) as one:
                one.get(KEYS[0])

        self.gets = Repeated(gets_of(client), 0.002)
        self.others = {
            "newcomers": Repeated(newcomer, 0.3),
            "healthz": Repeated(lambda: probe(cluster, "/healthz"), 0.3),
            "readyz": Repeated(lambda: probe(cluster, "/readyz"), 0.3),
            "grpc health": Repeated(lambda: probe_grpc(cluster), 0.3),
        }

    @contextmanager
    def running(self) -> Iterator[Load]:
        with beside(*(each.run for each in (self.gets, *self.others.values()))):
            yield self
