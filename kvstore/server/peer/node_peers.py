"""Connects the replicas of a node to the links between servers: the node's credentials, and outgoing and incoming
calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvstore.env import Env
from kvstore.env.secret import ClusterSecret
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore
from kvstore.server.peer.links import PeerLinks
from kvstore.server.peer.proof import NONCE_BYTES, PURPOSE, Credentials
from kvstore.server.peer.server import Handler, PeerServer
from kvstore.types import PartitionId, ServerId


async def credentials_of(env: Env, server: ServerId, store: MetadataStore, secret: ClusterSecret) -> Credentials:
    """Return the credentials with which the server proves that it belongs to the cluster. Reads the cluster's id
    from the metadata store. Raises MetadataError."""
    cluster = await LayoutStore(store).instance_id()
    return Credentials(server, cluster, secret.derive_all(PURPOSE), partial(env.random.randbytes, NONCE_BYTES))


class NodePeers:
    """The replicas' Peers. Outgoing calls use this server's links, and incoming calls arrive at its PeerServer."""

    def __init__(self, links: PeerLinks, server: PeerServer) -> None:
        self.call, self.silent_s = links.call, links.silent_s
        self.serve: Callable[[PartitionId, Handler], None] = server.serve
        self.forget = server.forget
