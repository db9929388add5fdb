"""The interfaces through which a partition's replicas ask the servers around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvstore.types import PartitionId, ServerId


class Peers(Protocol):
    """Requests between the replicas of a partition, over the same links that forward operations. Bounded in size and
    time."""

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Ask the partition's replica on `server`. Raises Unavailable when it was not reached (connection refused is
        seen at once, and says so in `PeerRefused`), OutcomeUnknown when no answer came in time, and whatever StoreError
        its handler raised."""
        ...

    def serve(self, partition: PartitionId, handler: Callable[[ServerId, str, bytes], Awaitable[bytes]]) -> None:
        """Let `handler(from_server, method, body)` answer this partition's calls on this node."""
        ...

    def forget(self, partition: PartitionId) -> None:
        """Answer no more calls for the partition."""
        ...
