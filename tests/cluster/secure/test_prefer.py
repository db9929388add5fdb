"""From plain to TLS, node by node, under load: prefer everywhere, then require everywhere. Real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from kvstore.client import Client
from kvstore.errors import StoreError
from tests.beside import beside
from tests.cluster.harness import Cluster, running_cluster
from tests.cluster.test_tls import Secured

pytestmark = [pytest.mark.cluster]
REST_S = 0.05
"""Pause of the load between two keys, because restarting nodes need the processors too."""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("prefer")
    with running_cluster(directory) as cluster:
        found = Secured(directory)
        found.cluster = cluster
        yield found


class Load:
    """Writes and reads of a Python client, without TLS until the test switches it on. The client retries
    each operation until it is done or has failed."""

    def __init__(self, secured: Secured) -> None:
        self._secured = secured
        self.uses_tls = False
        self.acknowledged: dict[bytes, bytes] = {}
        self.failures: list[Exception] = []

    def has_gone_on(self, before: int) -> bool:
        return bool(self.failures) or len(self.acknowledged) > before + 20

    def wait_on(self) -> None:
        """Wait until the load has done more work."""
        before = len(self.acknowledged)
        self._secured.cluster.wait_until(lambda: self.has_gone_on(before), "work goes on")
        assert self.failures == []

    def run(self, over: threading.Event) -> None:
        try:
            while not over.is_set():
                self._use(over, uses_tls=self.uses_tls)
        except Exception as error:  # noqa: BLE001 - the test looks at them
            self.failures.append(error)

    def _use(self, over: threading.Event, *, uses_tls: bool) -> None:
        url = self._secured.url(*self._secured.cluster.ids) if uses_tls else self._secured.cluster.url
        with Client(f"{url}{'&' if uses_tls else '?'}timeout=60s") as client:
            while not over.is_set() and uses_tls == self.uses_tls:
                key = b"key-%d" % len(self.acknowledged)
                client.put(key, key[::-1])
                self.acknowledged[key] = key[::-1]
                found = client.get(key)
                assert found is not None
                assert found.value == key[::-1]
                over.wait(REST_S)


def restarted(secured: Secured, node: str, mode: str) -> None:
    """Restart a node with TLS in this mode, and wait until it and all partitions serve."""
    cluster = secured.cluster
    config = Path(cluster.file.node(node).config)
    text = config.read_text().partition("\n[tls]")[0]
    table = f'\n[tls]\ncert = "{secured.cert}"\nkey = "{secured.key}"\nca = "{secured.ca}"\nmode = "{mode}"\n'
    cluster.terminate(node)
    config.write_text(f"{text}{table}")
    cluster.start_node(node)
    serves: Callable[[], object] = lambda: secured.https(node, "/clusterz") == b"ok\n"  # noqa: E731
    cluster.wait_until(serves, f"{node} serves with TLS")


def is_let_in(cluster: Cluster, node: str, **options: str) -> bool:
    with suppress(redis.RedisError, OSError):
        return bool(cluster.redis(node, **options).ping())
    return False


def test_switch_from_plain_to_required_tls_under_load_loses_nothing(secured: Secured) -> None:
    """docs/protocol.md S1"""
    cluster = secured.cluster
    with_tls = {"ssl": True, "ssl_ca_certs": str(secured.ca)}
    load = Load(secured)
    with beside(load.run):
        load.wait_on()
        for node in cluster.ids:
            restarted(secured, node, "prefer")
            load.wait_on()
            assert is_let_in(cluster, node)
            assert is_let_in(cluster, node, **with_tls)  # type: ignore[arg-type]
            assert cluster.status(node)["tls_mode"] == "prefer"
        load.uses_tls = True
        load.wait_on()
        for node in cluster.ids:
            restarted(secured, node, "require")
            load.wait_on()
            assert not is_let_in(cluster, node)
            assert is_let_in(cluster, node, **with_tls)  # type: ignore[arg-type]
    assert load.failures == []
    with pytest.raises(StoreError), Client(f"{cluster.url}?timeout=2s") as plain:
        plain.get(b"key-0")
    with Client(f"{secured.url(*cluster.ids)}&timeout=60s") as client:
        found = client.get_many(list(load.acknowledged))
        lost = [
            key for key, value in load.acknowledged.items() if (item := found.get(key)) is None or item.value != value
        ]
    assert (len(load.acknowledged) > 100, lost) == (True, [])
