"""Both halves of the links between servers, as a node's replicas use them: kvstore.partition.ports.Peers."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.server.peer.links import PeerLinks
from kvstore.server.peer.server import Handler, PeerServer
from kvstore.types import PartitionId


class NodePeers:
    """The replicas' Peers: calls go out over this server's links, and come in from its peer server."""

    def __init__(self, links: PeerLinks, server: PeerServer) -> None:
        self.call = links.call
        self.serve: Callable[[PartitionId, Handler], None] = server.serve
        self.forget = server.forget
