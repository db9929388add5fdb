"""The requests of `up` to each node in a cluster with authentication."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hiredis
import pytest

from kvstore.access import Switch
from kvstore.devcluster.probe import probe
from kvstore.errors import Unavailable
from kvstore.server.access.identities import Access
from kvstore.types import PartitionId
from tests.client.model import ModelCluster
from tests.client.serving import Servers, serving_in_a_thread
from tests.server.access.tables import table
from tests.waiting import PATIENCE_S

KEYS = {PartitionId("p1"): b"x"}
"""A user with read access only."""
USERS = ["reader", "tenant", "root", "nobody", None]


@pytest.fixture(params=[True, False], ids=["on", "off"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    make: Callable[[], Access] = lambda: Access(table(Switch(request.param)))  # noqa: E731
    with serving_in_a_thread(ModelCluster(), access=make) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a thread of this process, which can be delayed by some seconds."""
    monkeypatch.setattr("kvstore.devcluster.probe._TIMEOUT_S", PATIENCE_S)


@pytest.mark.parametrize("user", USERS)
def test_node_serves_every_caller(servers: Servers, user: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_USER", raising=False)
    monkeypatch.delenv("KVSTORE_PASSWORD_FILE", raising=False)
    if user is not None:
        monkeypatch.setenv("KVSTORE_USER", user)
        monkeypatch.setenv("KVSTORE_PASSWORD", "secret")
    for endpoint in servers.cluster.endpoints.values():
        probe(endpoint.grpc, endpoint.resp, KEYS)


def test_node_whose_redis_port_is_closed_does_not_serve(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_USER", "reader")
    monkeypatch.setenv("KVSTORE_PASSWORD", "secret")
    endpoint = next(iter(servers.cluster.endpoints.values()))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1:"):
        probe(endpoint.grpc, "127.0.0.1:1", KEYS)


def test_redirect_counts_as_an_answer(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_USER", "reader")
    monkeypatch.setenv("KVSTORE_PASSWORD", "secret")
    answers: list[object] = [b"OK", hiredis.ReplyError("MOVED 1 n2:1"), hiredis.ReplyError("ERR no")]
    monkeypatch.setattr("kvstore.devcluster.probe._Connection.ask", lambda self, *words: answers.pop(0))
    endpoint = next(iter(servers.cluster.endpoints.values()))
    with pytest.raises(Unavailable, match=r"partition p2.*ERR no"):
        probe(endpoint.grpc, endpoint.resp, {PartitionId("p1"): b"x", PartitionId("p2"): b"y"})
