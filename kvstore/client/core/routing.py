"""Chooses the server to ask for a key, by topologies and errors that the client has been told. Decides only.

What is known may be wrong at any time: it costs a detour, never a wrong answer, because every server checks for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.client.core.operation import ClientOperation
from kvstore.client.core.operations import names_its_partition
from kvstore.client.core.values import RING, Level, Token
from kvstore.errors import Moved, NotLeader, StoreError, Unavailable
from kvstore.proto import kv_pb2
from kvstore.ring.hashing import TOKENS, token_of

if TYPE_CHECKING:
    from random import Random


@dataclass(slots=True)
class PartitionRoute:
    """One partition's leader and replicas, as far as they are known."""

    leader: str = ""
    """A server id."""
    epoch: int = 0
    replicas: tuple[str, ...] = ()
    hint: str = ""
    """An address that an error named, until a topology knows better."""


@dataclass(slots=True)
class Routing:
    """The ring, the leaders and the addresses, as far as this client knows."""

    cluster: str = ""
    """The id of the cluster that is meant, or else that answered first; empty until a server has told."""
    answered: set[str] = field(default_factory=set)
    """Addresses at which its servers have given a topology, and no other's has since."""
    foreign: set[str] = field(default_factory=set)
    """Those at which another cluster's server has answered last."""
    ring_version: int = 0
    seen_version: int = 0
    """The latest that an answer, or the token of another client, has named."""
    partitions: dict[str, PartitionRoute] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    """Those that own something, sorted: who asks all for their part asks these. Others need not have a leader."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Server id → where its gRPC listens."""
    stream_endpoints: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Where a server's gRPC listens → its id, and where its Redis port is."""
    _ranges: tuple[list[int], list[str]] = ([], [])
    """Their bounds, and who owns each: replaced together, because other threads look."""

    @property
    def is_known(self) -> bool:
        return bool(self._ranges[0])

    def partition_of(self, key: bytes) -> str:
        """The partition that owns `key`. Not before a topology was learnt."""
        bounds, owners = self._ranges
        return owners[bisect_left(bounds, token_of(key))]

    def redirect(self, operation: ClientOperation) -> None:
        """Give an operation that goes out again the partition of its key. Raises Moved if it names one that the ring
        has no more."""
        if not names_its_partition(operation):
            operation.partition = self.partition_of(operation.key)
        elif operation.partition not in self.partitions:
            raise Moved("", self.ring_version)

    def strengthen(self, operation: ClientOperation) -> None:
        """A session read is asked of replicas by the ring that the session has heard of. Until that is known here, it
        goes to the leader as a linearizable one: a replica might understand the token of another partition."""
        if operation.level == Level.SESSION and self.seen_version > self.ring_version:
            operation.level = Level.LINEARIZABLE

    def leader_of(self, partition: str) -> str:
        """Where the partition's leader listens; empty if nobody knows."""
        route = self.partitions.get(partition)
        if route is None:
            return ""
        return route.hint or self.addresses.get(route.leader, "")

    def replicas_of(self, partition: str) -> list[str]:
        """Where the partition's replicas listen, in the ring's order."""
        route = self.partitions.get(partition)
        found = (self.addresses.get(replica, "") for replica in route.replicas) if route else ()
        return [address for address in found if address]

    def candidates(self, partition: str, endpoints: Sequence[str], *, follow: bool, turn: int) -> Iterator[str]:
        """Whom to ask about a partition, best first: its leader (with `follow` any replica), then those who forward."""
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
        """Whom to ask for a watch, of a key or of many, best first: replicas of the key's partition read its log at
        home. Drawn, so that watches spread over the servers."""
        replicas = self.replicas_of(self.partition_of(key)) if key is not None and self.is_known else []
        near = list(filter(self.is_ours, replicas))
        known = self.everybody(endpoints)
        others = [each for each in filter(self.is_ours, known) if each not in near]
        rng.shuffle(near)
        rng.shuffle(others)
        return [*near, *others] or known

    def everybody(self, endpoints: Sequence[str]) -> list[str]:
        """All addresses, the configured ones first."""
        return list(dict.fromkeys((*endpoints, *sorted(self.addresses.values()))))

    def is_named(self, address: str) -> bool:
        """Whether a server of the cluster has named the address as one of its own."""
        return address in self.addresses.values() or any(each.hint == address for each in self.partitions.values())

    def is_ours(self, address: str) -> bool:
        """Whether who listens there is known to be of the cluster."""
        return address in self.answered or (self.is_named(address) and address not in self.foreign)

    def check(self, message: kv_pb2.TopologyResponse, address: str) -> None:
        """Raise Unavailable for a topology of another cluster than the one that is meant, or the first: what is written
        there is not here, though its servers and partitions have the same names."""
        self.cluster = self.cluster or message.cluster
        if message.cluster and message.cluster != self.cluster:
            self.answered.discard(address)
            self.foreign.add(address)
            raise Unavailable(
                f"{address}, server {message.server}, is of another cluster: want {self.cluster}, got {message.cluster}"
            )
        self.answered.add(address)
        self.foreign.discard(address)

    def learn(self, message: kv_pb2.TopologyResponse) -> bool:
        """Take over what is newer in a server's topology. True if an address to ask may have changed."""
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
        """Forget servers that a topology of this ring does not name: where nodes are replaced by new ones, most that
        were ever known are gone for good, and each of these that is asked costs a second. A server that does not see
        all who have replicas or lead says nothing of others: it may see none."""
        needed = {server for route in self.partitions.values() for server in (*route.replicas, route.leader) if server}
        if needed and needed <= named.keys():
            self.addresses = dict(named)

    def _forget_addresses(self, gone: set[str]) -> None:
        """Addresses that no server has any more: who listens there next has to say first of which cluster it is. Those
        at which another cluster's server was met stay `foreign`, since a server that lags may name them again."""
        if gone:
            self.answered -= gone
            self.stream_endpoints = {
                address: endpoint for address, endpoint in self.stream_endpoints.items() if address not in gone
            }

    def _learn_ring(self, message: kv_pb2.TopologyResponse) -> None:
        ids = [each.id for each in message.partitions]
        if message.ring_version == self.ring_version or not message.tokens:
            return
        # The range that wraps is listed twice, so that a lookup is one bisection.
        owners = [ids[place] for place in message.owners]
        self._ranges = [*message.tokens, TOKENS], [*owners, owners[0]]
        self.owners = sorted(set(owners))
        self.partitions = {each: self.partitions.get(each) or PartitionRoute() for each in ids}
        self.ring_version = message.ring_version

    def note_ring_version(self, version: int) -> bool:
        """A ring of this version is there. True if it is not known here."""
        if version > self.seen_version:
            self.seen_version = version
        return version > self.ring_version

    def token(self, tokens: Token) -> dict[str, int]:
        """How far a session is that has seen `tokens`, as it may be given to another client."""
        return {**tokens, RING: max(self.ring_version, self.seen_version)}

    def learn_from(self, error: StoreError) -> bool:
        """Take a hint from an error. True if a topology should be asked for."""
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
