"""A client's view of its cluster. Decides only."""

from __future__ import annotations

from typing import Protocol

from kvstore.client.core.routing import Routing


class RoutingEngine(Protocol):
    """The part of a client's engine that knows the cluster."""

    routing: Routing

    def time_ms(self) -> int: ...


class ClusterView:
    """The cluster as servers last described it to this client. Reading it costs no request."""

    def __init__(self, engine: RoutingEngine) -> None:
        self._engine = engine

    def id(self) -> str:
        """Return the cluster's id, assigned when it was founded; empty if no server has reported it."""
        return self._engine.routing.cluster

    def partition_of(self, key: bytes) -> str:
        """Return the id of the partition that owns a key."""
        return self._engine.routing.partition_of(key)

    def token_of(self, key: bytes) -> int:
        """Return the key's token, its place on the ring, by the cluster's key hash."""
        return self._engine.routing.hash.token_of(key)

    def leader_of(self, partition: str) -> str:
        """Return the address (`host:port`) of a partition's leader; empty if no leader is known."""
        return self._engine.routing.leader_of(partition)

    def partitions(self) -> list[str]:
        """Return the ids of the partitions, sorted."""
        return sorted(self._engine.routing.partitions)

    def time_ms(self) -> int:
        """Return the cluster's time in milliseconds since 1970, accurate to some seconds; 0 if no server has reported
        it. Keys expire by this time, not by the clock of this machine."""
        return self._engine.time_ms()
