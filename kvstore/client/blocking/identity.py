"""Asks of which cluster a server is, for callers that have a channel and no client. Blocking."""

from __future__ import annotations

import grpc

from kvstore.client.core.routing import Routing
from kvstore.proto import kv_pb2, kv_pb2_grpc

ASK_S = 5.0


def check_cluster(channel: grpc.Channel, wanted: str, address: str, timeout_s: float) -> str:
    """Return the id of the cluster whose server answers on the channel; `wanted` if it is too old to tell. Raises
    Unavailable if it is not the one that is wanted (empty: any), and errors of gRPC."""
    routing = Routing(cluster=wanted)
    message = kv_pb2_grpc.KVStub(channel).Topology(kv_pb2.TopologyRequest(), timeout=min(timeout_s, ASK_S))
    routing.check(message, address)
    return routing.cluster
