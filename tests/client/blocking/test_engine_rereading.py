"""The blocking client reads the topology every ten seconds, in the time of a caller that wants something else."""

from __future__ import annotations

import socket

import pytest

from kvstore.client import Client
from kvstore.client.blocking.link import BlockingLink
from kvstore.errors import Unavailable
from kvstore.proto import kv_pb2
from tests.client.model import ModelCluster
from tests.client.serving import PATIENT, serving_in_a_thread


def test_topology_is_read_from_connected_servers_before_silent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_thread(ModelCluster()) as servers, socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(servers.url.replace("kv://", f"kv://{address},") + "?connect_timeout=500ms&timeout=60s") as client:
            client.put(b"k", b"1")
            asked = list[str]()
            topology = BlockingLink.topology

            def told(link: BlockingLink, timeout_s: float) -> kv_pb2.TopologyResponse:
                asked.append(link.address)
                return topology(link, timeout_s)

            monkeypatch.setattr(BlockingLink, "topology", told)
            assert client._engine is not None
            client._engine._read_at = -1e9  # ten seconds later
            client._engine._backoff.is_backing_off = lambda address, now: False  # type: ignore[method-assign]
            client.put(b"k", b"2")
            assert len(asked) == 1
            assert asked != [address]


def test_topology_read_leaves_half_of_the_time_to_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_in_a_thread(ModelCluster()) as servers, Client(servers.patient_url) as client:
        client.put(b"k", b"1")
        given = list[float]()

        def hang(link: BlockingLink, timeout_s: float) -> kv_pb2.TopologyResponse:
            given.append(timeout_s)
            raise Unavailable("no answer")

        monkeypatch.setattr(BlockingLink, "topology", hang)
        assert client._engine is not None
        client._engine._read_at = -1e9
        client._engine._backoff.note_failure = lambda address, now: None  # type: ignore[method-assign]
        client.put(b"k", b"2", timeout_s=20.0)
        assert len(given) == 3
        assert max(given) <= 10.0


def test_links_to_removed_servers_are_closed() -> None:
    """Nobody asks removed servers, so nobody would find their links broken. One of them was an endpoint of the
    client."""
    endpoint, named = "127.0.0.1:9", "127.0.0.1:19"
    with serving_in_a_thread(ModelCluster()) as servers, Client(f"{servers.url},{endpoint}{PATIENT}") as client:
        engine = client._engine
        assert engine is not None
        engine.routing.addresses |= {"n8": endpoint, "n9": named}
        engine.routing.answered.add(endpoint)
        gone = [engine._open(each) for each in (endpoint, named)]
        assert all(link is not None and link.is_ours for link in gone)
        client.put(b"k", b"1")
        assert {endpoint, named} <= engine._links.keys()
        engine._read_at = -1e9  # ten seconds later
        client.put(b"k", b"2")
        assert not {endpoint, named} & engine._links.keys()
        assert engine._links
        for link in gone:
            assert link is not None
            with pytest.raises(Unavailable, match="is closed"):
                link.topology(1.0)
