"""Processes whose end is proven (docs/protocol.md, G28)."""

from __future__ import annotations

import asyncio

from kvstore.env.death.port import identity_of

REMEMBERED_MAX = 1_024
"""Number of ends that are remembered. Any client that reaches the Redis port can displace them; a takeover then waits
for the lease."""


class ProvenDeaths:
    """The ends of other processes of which this process has received proofs. A proof stays valid forever."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Set at the next proof, and then replaced by a new event."""
        self._ended: dict[bytes, None] = {}
        """Identities of processes that have ended, the oldest proof first."""

    def note(self, certificate: bytes) -> None:
        """Record the end of the process to which the certificate belongs."""
        identity = identity_of(certificate)
        self._ended.pop(identity, None)
        if len(self._ended) >= REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[identity] = None
        self.news.set()
        self.news = asyncio.Event()

    def is_proven(self, identity: bytes) -> bool:
        """Return True if the process with this identity has ended. An empty identity belongs to no process."""
        return identity in self._ended
