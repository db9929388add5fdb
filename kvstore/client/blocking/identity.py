"""Asks a server for the id of its cluster, for callers that have a channel and no client. Blocking."""

from __future__ import annotations

import grpc

from kvstore.client.core.routing import Routing
from kvstore.proto import kv_pb2, kv_pb2_grpc

ASK_S = 5.0


def check_cluster(channel: grpc.Channel, wanted: str, address: str, timeout_s: float) -> str:
    """Return the id of the server's cluster, or `wanted` if the server is too old to report it. Raises Unavailable if
    it is not the wanted cluster (empty: any), and gRPC errors."""
    routing = Routing(cluster=wanted)
    message = kv_pb2_grpc.KVStub(channel).Topology(kv_pb2.TopologyRequest(), timeout=min(timeout_s, ASK_S))
    routing.check(message, address)
    return routing.cluster
