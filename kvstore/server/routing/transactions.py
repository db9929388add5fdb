"""Reaches the leaders of other partitions for a leader that carries out transactions. The operations that it sends are
routed by key, like those of clients, so they follow moves and changes of leaders. Namespaces are not charged for these
operations, because the server that received the transaction has charged them."""

from __future__ import annotations

from typing import Protocol

from kvstore.partition.state.commands import Op, Sink
from kvstore.partition.transactions.ports import Participants
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.types import PartitionId


class Routing(Protocol):
    """The part of the dispatcher that is used here."""

    @property
    def topology(self) -> ClusterTopology: ...

    def submit_uncharged(self, op: Op, sink: Sink, token: int) -> None:
        """Execute an operation on the partition that owns its key, without charging namespaces."""
        ...


class RoutedParticipants(Participants):
    """The leaders of all partitions, as the router of this server reaches them."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing

    def owner_of(self, key: bytes) -> PartitionId:
        return self._routing.topology.ring.partition_of(key)

    def send(self, op: Op, sink: Sink, token: int) -> None:
        self._routing.submit_uncharged(op, sink, token)
