"""How far a partition's log may be trimmed. Pure.

Engines run without a log of their own, so what counts is what a replica has synced, not what it has applied: one power
cut takes every engine back to its last sync, and the log must still reach from there (docs/protocol.md, Trim).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.types import Seq, ServerId

FORGET_S = 24 * 3600.0
"""A replica away for longer stops holding the log back if enough others have what it lacks; it installs a snapshot."""


@dataclass(slots=True)
class _Seen:
    durable_seq: Seq
    at: float


class Retention:
    """Remembers what each replica has synced, also of those that are away. A leader's knowledge: it ends with its
    lead."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._seen: dict[ServerId, _Seen] = {}

    def observe(self, durable: Mapping[ServerId, Seq], now: float) -> None:
        """Note what the replicas that are up have published."""
        for server, seq in sorted(durable.items()):
            # Lower than before if the replica was wiped: the new claim is the true one.
            self._seen[server] = _Seen(seq, now)

    def floor(self, replicas: Sequence[ServerId], copies_min: int, now: float) -> Seq:
        """The sequence up to which the log is held by the state of every replica that counts, and of at least
        `copies_min`."""
        counting = [server for server in replicas if not self._forgotten(server, replicas, now)]
        durable = [self._durable(server) for server in counting]
        if len(durable) < copies_min:
            return Seq(0)
        return min(durable, default=Seq(0))

    def _durable(self, server: ServerId) -> Seq:
        seen = self._seen.get(server)
        return seen.durable_seq if seen else Seq(0)

    def _forgotten(self, server: ServerId, replicas: Sequence[ServerId], now: float) -> bool:
        seen = self._seen.get(server)
        if now - (seen.at if seen else self._since) <= FORGET_S:
            return False
        ahead = [other for other in replicas if other != server and self._durable(other) > self._durable(server)]
        return len(ahead) >= 2
