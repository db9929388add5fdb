"""The interface through which parts of a server call their counterparts on other servers."""

from __future__ import annotations

from typing import Protocol

from kvstore.types import PartitionId, ServerId


class PeerCalls(Protocol):
    """Calls to other servers. Implemented by kvstore.server.peer.links.PeerLinks."""

    async def call(self, server: ServerId, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Call `method` of the part that serves `partition` on the server, and return the bytes that it answers.
        Raises StoreError."""
        ...
