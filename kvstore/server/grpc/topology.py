"""The topology in the form for clients, and the wait for its next change."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.env import Clock
from kvstore.env.events import wait_within
from kvstore.proto import kv_pb2
from kvstore.ring.hashing import MURMUR3
from kvstore.rpc.channels import TIMEOUT_MAX_MS
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.grpc.session import progress_message
from kvstore.server.routing.backend import Backend


class Topologies:
    """The server's present topology as a numbered message, made once per change."""

    def __init__(self, backend: Backend, clock: Clock, server: str, cluster: str) -> None:
        self._backend, self._clock, self._server, self._cluster = backend, clock, server, cluster
        self._number = 1
        self._message: kv_pb2.TopologyResponse | None = None
        self._changed = asyncio.Event()
        self._seen = what_clients_see(backend.topology)
        self._unsubscribe = backend.on_topology(self._on_change)

    def close(self) -> None:
        self._unsubscribe()

    async def wait(self, known: int, wait_ms: int) -> kv_pb2.TopologyResponse:
        """Return the topology: at once if its number is not `known`, else the next one, or the same after `wait_ms`
        milliseconds."""
        if known == self._number and wait_ms:
            changed = self._changed
            await wait_within(changed, min(wait_ms, TIMEOUT_MAX_MS) / 1000)
        return self.message()

    def message(self) -> kv_pb2.TopologyResponse:
        if self._message is None:
            self._message = topology_message(self._backend.topology)
            self._message.known, self._message.server = self._number, self._server
            self._message.cluster = self._cluster
        for partition in self._message.partitions:
            partition.progress.CopyFrom(progress_message(self._backend, self._clock, partition.id))
        return self._message

    def _on_change(self) -> None:
        seen = what_clients_see(self._backend.topology)
        if seen == self._seen:
            return  # a step of a move that changes no routing
        self._seen = seen
        self._number += 1
        self._message = None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def what_clients_see(topology: ClusterTopology) -> tuple[Any, ...]:
    """Return the part of the cluster's state that clients see. Decides only."""
    return topology.ring.routed, topology.ring.partitions, topology.leaders, topology.servers


def topology_message(topology: ClusterTopology) -> kv_pb2.TopologyResponse:
    """Return the ring, leaders and servers as a message. Decides only."""
    ring = topology.ring
    members = [ring.partitions[partition] for partition in sorted(ring.partitions)]
    place = {member.id: index for index, member in enumerate(members)}
    message = kv_pb2.TopologyResponse(ring_version=ring.routed, hash=ring.hash.name)
    owners = [place[owner] for owner in ring.tokens.values()]
    if ring.hash is MURMUR3:
        message.tokens.extend(ring.tokens)
        message.owners.extend(owners)
    else:
        message.hashed_tokens.extend(ring.tokens)
        message.hashed_owners.extend(owners)
    for member in members:
        leader, epoch = topology.leaders.get(member.id, ("", 0))
        message.partitions.add(
            id=member.id, state=member.state.value, leader=leader, epoch=epoch, replicas=member.replicas
        )
    for server, endpoints in sorted(topology.servers.items()):
        message.servers.add(
            id=server, grpc=endpoints.grpc, resp=endpoints.resp, http=endpoints.http, zone=endpoints.zone
        )
    return message
