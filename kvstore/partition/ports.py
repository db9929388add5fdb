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

    def unheard_s(self, server: ServerId) -> float | None:
        """Return for how many seconds this server has heard nothing of the other one, although it tried; None if it
        hears it, has not tried, or has itself just stood still. It adds no traffic while servers are heard."""
        ...

    def serve(self, partition: PartitionId, handler: Callable[[ServerId, str, bytes], Awaitable[bytes]]) -> None:
        """Let `handler(from_server, method, body)` answer this partition's calls on this node."""
        ...

    def forget(self, partition: PartitionId) -> None:
        """Answer no more calls for the partition."""
        ...
