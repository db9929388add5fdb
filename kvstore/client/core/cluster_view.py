"""A client's knowledge of its cluster. Decides only."""

from __future__ import annotations

from typing import Protocol

from kvstore.client.core.routing import Routing


class RoutingEngine(Protocol):
    """The engine that a client runs on."""

    routing: Routing

    def time_ms(self) -> int: ...


class ClusterView:
    """The cluster as its servers last told it to this client; nobody is asked."""

    def __init__(self, engine: RoutingEngine) -> None:
        self._engine = engine

    def partition_of(self, key: bytes) -> str:
        """The partition that owns the key."""
        return self._engine.routing.partition_of(key)

    def leader_of(self, partition: str) -> str:
        """Where the partition's leader listens, `host:port`; empty if nobody is known to lead it."""
        return self._engine.routing.leader_of(partition)

    def partitions(self) -> list[str]:
        """The ids of the partitions, sorted."""
        return sorted(self._engine.routing.partitions)

    def time_ms(self) -> int:
        """The cluster's time, to some seconds, in milliseconds since 1970; 0 if no server has told. Keys
        expire by it, whatever this machine's date is."""
        return self._engine.time_ms()
