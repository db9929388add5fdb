"""The table of slots that clients of Redis Cluster use, and the redirects that keep it fresh. Decides only.

If the cluster's key hash is `slots`, a slot belongs to one partition, and its node is the partition's leader. With any
other key hash no table can be true. The slots are then divided among the servers, so that a client spreads its commands
over all of them (docs/design/0025-redis-cluster-slots.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from kvstore.partition.state.tokens import spans_of
from kvstore.ring.hashing import SLOTS, SLOTS_HASH, slot_of_token
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import PartitionId, ServerId


class SlotNode(NamedTuple):
    """A server as clients see it."""

    server: ServerId
    host: bytes
    port: int

    @property
    def id(self) -> bytes:
        """Forty hexadecimal digits."""
        return node_id(self.server)


class Shard(NamedTuple):
    """The contiguous ranges of slots, as first and last slots, that have the same nodes: the primary, then replicas."""

    ranges: tuple[tuple[int, int], ...]
    nodes: tuple[SlotNode, ...]


class SlotRange(NamedTuple):
    """The slots from `first` to `last`, and their nodes: the primary, then replicas."""

    first: int
    last: int
    nodes: tuple[SlotNode, ...]


def node_id(server: ServerId) -> bytes:
    """Return the node id that clients see: forty hexadecimal digits."""
    return hashlib.sha1(server.encode(), usedforsecurity=False).hexdigest().encode()


def nodes_of(topology: ClusterTopology) -> list[SlotNode]:
    """Return all servers with a Redis address, in order."""
    return [node for each in sorted(topology.servers) if (node := _node_or_none(topology, each)) is not None]


def shards(topology: ClusterTopology) -> list[Shard]:
    """Return the shard of each partition that owns slots, or of each server if the key hash is not `slots`. A partition
    without a reachable replica is left out."""
    if topology.ring.hash is not SLOTS_HASH:
        nodes = nodes_of(topology)
        count = len(nodes)
        return [
            Shard(((SLOTS * number // count, SLOTS * (number + 1) // count - 1),), (node,))
            for number, node in enumerate(nodes)
        ]
    found = []
    for partition in topology.ring.owners:
        nodes = _nodes_of_partition(topology, partition)
        spans = spans_of(topology.ring, partition)
        if nodes:
            ranges = tuple((slot_of_token(first), slot_of_token(last)) for first, last in spans)
            found.append(Shard(ranges, tuple(nodes)))
    return found


def slot_ranges(topology: ClusterTopology) -> list[SlotRange]:
    """Return all ranges of slots in order. Adjacent ranges with the same nodes are one."""
    ranges = sorted(SlotRange(*each, shard.nodes) for shard in shards(topology) for each in shard.ranges)
    found: list[SlotRange] = []
    for each in ranges:
        if found and found[-1].nodes == each.nodes and found[-1].last + 1 == each.first:
            found[-1] = SlotRange(found[-1].first, each.last, each.nodes)
        else:
            found.append(each)
    return found


def ranges_by_primary(topology: ClusterTopology) -> dict[ServerId, list[tuple[int, int]]]:
    """Return the ranges of slots, as first and last slots, by the server that is their primary."""
    ranges = sorted((each.nodes[0].server, each.first, each.last) for each in slot_ranges(topology))
    return {
        server: [(first, last) for _, first, last in mine] for server, mine in groupby(ranges, key=lambda each: each[0])
    }


def _nodes_of_partition(topology: ClusterTopology, partition: PartitionId) -> list[SlotNode]:
    """Return the leader and then the other replicas, in the order of the ring. Without a known leader, the first
    replica comes first: it forwards the commands."""
    leader, _ = topology.leaders.get(partition, (None, 0))
    replicas = topology.ring.partitions[partition].replicas
    order = replicas if leader is None else (leader, *(each for each in replicas if each != leader))
    return [node for each in order if (node := _node_or_none(topology, each)) is not None]


def _node_or_none(topology: ClusterTopology, server: ServerId) -> SlotNode | None:
    endpoints = topology.servers.get(server)
    if endpoints is None or not endpoints.resp:
        return None
    host, _, port = endpoints.resp.rpartition(":")
    return SlotNode(server, host.strip("[]").encode(), int(port))


class SlotRedirects:
    """Decides which commands get the reply MOVED: those on keys of one slot whose leader is another server that this
    server reaches. While the leader is unknown or unreachable, this server keeps the command until there is a leader,
    which spares the client its own search."""

    def __init__(
        self, server: ServerId, topology: Callable[[], ClusterTopology], is_reachable: Callable[[ServerId], bool]
    ) -> None:
        self._server, self._topology, self._is_reachable = server, topology, is_reachable

    def moved_or_none(self, keys: Sequence[bytes]) -> str | None:
        """Return the text of the error reply, or None if the command is executed here."""
        topology = self._topology()
        ring = topology.ring
        if ring.hash is not SLOTS_HASH:
            return None
        tokens = ring.hash.tokens_of(list(keys))
        partition = ring.owner_of(tokens[0])
        leader, _ = topology.leaders.get(partition, (None, 0))
        if leader is None or leader == self._server or len(set(map(slot_of_token, tokens))) > 1:
            return None
        node = _node_or_none(topology, leader)
        if node is None or not self._is_reachable(leader):
            return None
        return f"MOVED {slot_of_token(tokens[0])} {node.host.decode()}:{node.port}"
