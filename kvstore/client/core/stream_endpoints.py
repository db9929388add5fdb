"""The servers that take up sessions on their Redis ports, as far as a client knows. Decides only.

A server that can be reached and does not take them up is not asked for one again for a while: it may be an older one,
or its Redis port may be closed to this client.
"""

from __future__ import annotations

from kvstore.client.core.routing import Routing
from kvstore.proto import kv_pb2

BARRED_S = 60.0

StreamEndpoint = tuple[str, str]
"""A server's id, and where its Redis port is."""


class StreamEndpoints:
    """The doors that one client knows. Servers are named by where their gRPC listens; times are of the boot-time clock,
    in seconds."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._barred: dict[str, float] = {}

    def endpoint_or_none(self, address: str) -> StreamEndpoint | None:
        """None: no topology has told of it."""
        return self._routing.stream_endpoints.get(address)

    def may_try(self, address: str, now: float) -> bool:
        return now >= self._barred.get(address, now)

    def bar(self, address: str, now: float) -> None:
        """It was there, and had no stream."""
        self._barred = {each: until for each, until in self._barred.items() if now < until}
        self._barred[address] = now + BARRED_S


def stream_endpoint_in(message: kv_pb2.TopologyResponse) -> StreamEndpoint | None:
    """The door of the server that gave the topology."""
    for server in message.servers:
        if server.id == message.server and server.resp:
            return server.id, server.resp
    return None
