"""Occupied ports of a local cluster."""

from __future__ import annotations

import socket

import pytest

from kvstore.devcluster import ports
from kvstore.devcluster.ports import is_free, taken_message


def test_port_of_an_outgoing_connection_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert not is_free(f"127.0.0.1:{client.getsockname()[1]}")


@pytest.mark.parametrize(("port", "hints"), [(32_000, False), (33_000, True)])
def test_message_names_outgoing_connections_if_they_may_have_the_port(
    port: int, hints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "outgoing_ports", lambda: range(32_768, 61_000))
    message = taken_message(["127.0.0.1:2181 (ZooKeeper)", f"127.0.0.1:{port} (gRPC of n1)"], 20_100)
    assert "choose other ports with --port-offset, for example 20100" in message
    assert ("ports from 32768 to 60999 to outgoing connections" in message) == hints
