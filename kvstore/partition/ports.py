"""The interfaces through which a partition's replicas call the servers around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvstore.types import PartitionId, ServerId


class Peers(Protocol):
    """Requests between the replicas of a partition, over the links that also forward operations. Bounded in size and
    time."""

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Call the partition's replica on `server`. Raises Unavailable if the server was not reached (a refused
        connection is reported at once, as PeerRefused), OutcomeUnknown if no answer came in time, and any StoreError
        that the handler raised."""
        ...

    def silent_s(self, server: ServerId) -> float | None:
        """Return for how many seconds this server has received nothing from the other one, although it tried. None if
        it receives from it, has not tried, or has itself just been paused. Causes no traffic while the link is
        alive."""
        ...

    def serve(self, partition: PartitionId, handler: Callable[[ServerId, str, bytes], Awaitable[bytes]]) -> None:
        """Let `handler(from_server, method, body)` answer this partition's calls on this node."""
        ...

    def forget(self, partition: PartitionId) -> None:
        """Answer no more calls for the partition."""
        ...
