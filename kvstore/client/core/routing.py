"""Chooses the server to ask for a key, from topologies and errors that the client has received. Decides only.

The knowledge may be wrong at any time. That costs a detour, never a wrong answer, because every server checks for
itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import names_its_partition
from kvstore.client.core.values import RING, Level, Token
from kvstore.errors import Moved, NotLeader, OtherCluster, StoreError
from kvstore.proto import kv_pb2
from kvstore.ring.hashing import TOKENS, KeyHash, hash_named

if TYPE_CHECKING:
    from random import Random


@dataclass(slots=True)
class PartitionRoute:
    """Leader and replicas of one partition, as far as they are known."""

    leader: str = ""
    """Id of a server."""
    epoch: int = 0
    replicas: tuple[str, ...] = ()
    hint: str = ""
    """Address named by an error, used until a topology is newer."""


@dataclass(slots=True)
class Routing:
    """The ring, the leaders and the addresses, as far as this client knows them."""

    cluster: str = ""
    """Id of the configured cluster, or of the one that answered first; empty until a server has reported it."""
    answered: set[str] = field(default_factory=set)
    """Addresses whose last topology was of this cluster."""
    foreign: set[str] = field(default_factory=set)
    """Addresses whose last topology was of another cluster."""
    hash: KeyHash = field(init=False, repr=False, compare=False)
    """The cluster's key hash. Unset before the first topology, so that no key gets a token by a guess."""
    ring_version: int = 0
    seen_version: int = 0
    """Highest ring version that an answer, or the token of another client, has named."""
    partitions: dict[str, PartitionRoute] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    """Partitions that own a range, sorted. Requests to all partitions go to these; others need not have a leader."""
    addresses: dict[str, str] = field(default_factory=dict)
    """gRPC address by server id."""
    stream_endpoints: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Server id and Redis address, by gRPC address."""
    _ranges: tuple[list[int], list[str]] = ([], [])
    """Bounds of ranges, and the owner of each. Replaced together, because other threads read them."""

    @property
    def is_known(self) -> bool:
        return bool(self._ranges[0])

    def partition_of(self, key: bytes) -> str:
        """Return the partition that owns `key`. Requires a topology."""
        bounds, owners = self._ranges
        return owners[bisect_left(bounds, self.hash.token_of(key))]

    def redirect(self, operation: ClientOperation) -> None:
        """Give an operation that is sent again the partition of its key, and another replica its turn. Raises Moved if
        it names a partition that has left the ring."""
        operation.retries += 1
        if not names_its_partition(operation):
            operation.partition = self.partition_of(operation.key)
        elif operation.partition not in self.partitions:
            raise Moved("", self.ring_version)

    def strengthen(self, operation: ClientOperation) -> None:
        """Turn a session read into a linearizable one, which goes to the leader, until the ring that the session has
        seen is known here: a replica might misread the token of another partition."""
        if operation.level == Level.SESSION and self.seen_version > self.ring_version:
            operation.level = Level.LINEARIZABLE

    def leader_of(self, partition: str) -> str:
        """Return the address of a partition's leader; empty if it is not known."""
        route = self.partitions.get(partition)
        if route is None:
            return ""
        return route.hint or self.addresses.get(route.leader, "")

    def replicas_of(self, partition: str) -> list[str]:
        """Return the addresses of a partition's replicas, in the order of the ring."""
        route = self.partitions.get(partition)
        found = (self.addresses.get(replica, "") for replica in route.replicas) if route else ()
        return [address for address in found if address]

    def candidates(self, partition: str, endpoints: Sequence[str], *, follow: bool, turn: int) -> Iterator[str]:
        """Yield the addresses to ask about a partition, the best first: its leader (with `follow` any replica), then
        servers that forward."""
        leader = "" if follow else self.leader_of(partition)
        if leader:
            yield leader
        replicas = self.replicas_of(partition)
        if replicas:
            turn %= len(replicas)
            yield from replicas[turn:]
            yield from replicas[:turn]
        yield from self.everybody(endpoints)

    def watchers_of(self, key: bytes | None, rng: Random, endpoints: Sequence[str]) -> list[str]:
        """Return the servers to ask for a watch, the best first: replicas of the key's partition read its log locally.
        Random, so that watches spread over the servers."""
        replicas = self.replicas_of(self.partition_of(key)) if key is not None and self.is_known else []
        near = list(filter(self.is_ours, replicas))
        known = self.everybody(endpoints)
        others = [each for each in filter(self.is_ours, known) if each not in near]
        rng.shuffle(near)
        rng.shuffle(others)
        return [*near, *others] or known

    def everybody(self, endpoints: Sequence[str]) -> list[str]:
        """Return all addresses, the configured ones first."""
        return list(dict.fromkeys((*endpoints, *sorted(self.addresses.values()))))

    def is_named(self, address: str) -> bool:
        """Return True if a server of the cluster has named the address as one of its own."""
        return address in self.addresses.values() or any(each.hint == address for each in self.partitions.values())

    def is_ours(self, address: str) -> bool:
        """Return True if the server at the address is known to belong to the cluster."""
        return address in self.answered or (self.is_named(address) and address not in self.foreign)

    def check(self, message: kv_pb2.TopologyResponse, address: str) -> None:
        """Raise OtherCluster for the topology of another cluster than the configured or first one. Its data differ,
        even if servers and partitions have the same names."""
        self.cluster = self.cluster or message.cluster
        if message.cluster and message.cluster != self.cluster:
            self.answered.discard(address)
            self.foreign.add(address)
            raise OtherCluster(
                f"{address}, server {message.server}: expected a server of cluster {self.cluster}, got one "
                f"of {message.cluster}"
            )
        self.answered.add(address)
        self.foreign.discard(address)

    def learn(self, message: kv_pb2.TopologyResponse) -> bool:
        """Use what is newer in a server's topology. Returns True if an address to ask may have changed."""
        before = self._leaders()
        if message.ring_version >= self.ring_version:
            self._learn_ring(message)
        named = {server.id: server.grpc for server in message.servers if server.grpc}
        known = set(self.addresses.values())
        self.addresses = {**self.addresses, **named}
        self.stream_endpoints |= {
            server.grpc: (server.id, server.resp) for server in message.servers if server.grpc and server.resp
        }
        for each in message.partitions:
            route = self.partitions.get(each.id)
            if route is None:
                continue  # a ring older than ours
            route.replicas = tuple(each.replicas)
            if each.epoch > route.epoch or (each.epoch == route.epoch and each.leader):
                route.leader, route.epoch = each.leader, each.epoch
                route.hint = ""
        if message.ring_version >= self.ring_version:
            self._forget_all_but(named)
        self._forget_addresses(known - set(self.addresses.values()))
        return self._leaders() != before

    def _forget_all_but(self, named: Mapping[str, str]) -> None:
        """Forget servers that a topology of this ring does not name: where nodes are replaced, most servers that were
        ever known are gone, and asking each costs a second. A server that does not see all replicas and leaders proves
        nothing about others."""
        needed = {server for route in self.partitions.values() for server in (*route.replicas, route.leader) if server}
        if needed and needed <= named.keys():
            self.addresses = dict(named)

    def _forget_addresses(self, gone: set[str]) -> None:
        """Forget addresses that no server has any more: the next server there must identify its cluster first.
        Addresses of another cluster stay `foreign`, because a server that lags may name them again."""
        if gone:
            self.answered -= gone
            self.stream_endpoints = {
                address: endpoint for address, endpoint in self.stream_endpoints.items() if address not in gone
            }

    def _learn_ring(self, message: kv_pb2.TopologyResponse) -> None:
        ids = [each.id for each in message.partitions]
        tokens, placed = message.hashed_tokens or message.tokens, message.hashed_owners or message.owners
        if message.ring_version == self.ring_version or not tokens:
            return
        self.hash = hash_named(message.hash)
        # The range that wraps around is listed twice, so that a lookup is one bisection.
        owners = [ids[place] for place in placed]
        self._ranges = [*tokens, TOKENS], [*owners, owners[0]]
        self.owners = sorted(set(owners))
        self.partitions = {each: self.partitions.get(each) or PartitionRoute() for each in ids}
        self.ring_version = message.ring_version

    def note_ring_version(self, version: int) -> bool:
        """Record that a ring version exists. Returns True if that ring is not known here."""
        if version > self.seen_version:
            self.seen_version = version
        return version > self.ring_version

    def token(self, tokens: Token) -> dict[str, int]:
        """Return the token of a session that has seen `tokens`, for use by another client."""
        return {**tokens, RING: max(self.ring_version, self.seen_version)}

    def learn_from(self, error: StoreError) -> bool:
        """Use the hint in an error. Returns True if a topology should be requested."""
        match error:
            case NotLeader(partition=partition, address=address) if partition in self.partitions:
                route = self.partitions[partition]
                if address and address != self.leader_of(partition):
                    route.hint = address
                return True
            case Moved(ring_version=version):
                return version > self.ring_version
        return False

    def _leaders(self) -> list[str]:
        return [self.leader_of(partition) for partition in sorted(self.partitions)]
