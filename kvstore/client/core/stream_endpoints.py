"""The servers that accept sessions on their Redis port, as far as a client knows. Decides only.

A server that can be reached but offers no sessions is not asked for one for a while: it may be older, or its Redis port
may be closed to this client.
"""

from __future__ import annotations

from kvstore.client.core.routing import Routing
from kvstore.proto import kv_pb2

BARRED_S = 60.0

StreamEndpoint = tuple[str, str]
"""Id of a server, and its Redis address."""


class StreamEndpoints:
    """The stream endpoints that one client knows, by gRPC address. Times are of the boot-time clock, in seconds."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._barred: dict[str, float] = {}

    def endpoint_or_none(self, address: str) -> StreamEndpoint | None:
        """Return the endpoint of a server; None if no topology has named one."""
        return self._routing.stream_endpoints.get(address)

    def may_try(self, address: str, now: float) -> bool:
        return now >= self._barred.get(address, now)

    def bar(self, address: str, now: float) -> None:
        """Use no stream of this server for BARRED_S: it was reachable and offered none."""
        self._barred = {each: until for each, until in self._barred.items() if now < until}
        self._barred[address] = now + BARRED_S


def stream_endpoint_in(message: kv_pb2.TopologyResponse) -> StreamEndpoint | None:
    """Return the endpoint of the server that sent the topology."""
    for server in message.servers:
        if server.id == message.server and server.resp:
            return server.id, server.resp
    return None
