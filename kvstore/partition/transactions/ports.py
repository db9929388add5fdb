"""The interface through which the leaders of a transaction's partitions send each other operations."""

from __future__ import annotations

from typing import Protocol

from kvstore.partition.state.commands import Op, Sink
from kvstore.types import PartitionId


class Participants(Protocol):
    """The leaders of all partitions, as one leader reaches them while it carries out transactions."""

    def owner_of(self, key: bytes) -> PartitionId:
        """Return the partition that owns the key, as far as this server knows."""
        ...

    def send(self, op: Op, sink: Sink, token: int) -> None:
        """Send an operation to the leader of the partition that owns its key, wherever that is. The sink receives the
        result once, later, never from inside this call. It is OutcomeUnknown if the operation may have been done."""
        ...
