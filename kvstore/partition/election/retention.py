"""How far a partition's log may be trimmed. Decides only.

Engines run without a log of their own, so what counts is what a replica has synced, not what it has applied: one power
cut takes every engine back to its last sync, and the log must still reach from there (docs/protocol.md, G6).

A replica that is away holds the log, but not for ever (docs/protocol.md, G20): leaders add up how long they have seen
it away, each going on where the one before was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.types import Seq, ServerId

FORGET_S = 24 * 3600.0
"""A replica away for longer stops holding the log back if enough others have what it lacks; it installs a snapshot."""
NEVER_SEEN = Seq(0)


@dataclass(frozen=True, slots=True)
class Away:
    """A replica that does not say how far it is."""

    durable_seq: Seq
    """What it had synced when it last said so."""
    away_s: float
    """How long leaders have seen it away, at least."""


class Retention:
    """Remembers what each replica has synced, also of those that are away."""

    def __init__(self, away: Mapping[ServerId, Away]) -> None:
        """`away`: what former leaders have seen."""
        self.away = dict(away)
        self._durable: dict[ServerId, Seq] = {}
        """Of those that are up."""

    def look(
        self,
        replicas: Sequence[ServerId],
        durable: Mapping[ServerId, Seq],
        elapsed_s: float,
        stopped: Mapping[ServerId, Seq] | None = None,
    ) -> None:
        """Note what the replicas that are up have published. Those that are not have been away for `elapsed_s` more:
        the time since the last look, as far as this leader was awake to see it. Away are those too that are up and
        apply nothing any more, `stopped`: else they would hold the log for ever."""
        stopped = stopped or {}
        away: dict[ServerId, Away] = {}
        for server in replicas:
            if server in durable:
                continue
            before = self.away.get(server)
            if before is None:
                before = Away(self._durable.get(server, stopped.get(server, NEVER_SEEN)), 0.0)
            away[server] = Away(before.durable_seq, before.away_s + elapsed_s)
        # Lower than before if a replica was wiped: the new claim is the true one.
        self.away, self._durable = away, dict(durable)

    def floor(self, replicas: Sequence[ServerId], copies_min: int) -> Seq:
        """The sequence up to which the log is held by the state of every replica that counts, and of at least
        `copies_min`."""
        durable = [self._durable_seq(server) for server in replicas if not self._is_forgotten(server, replicas)]
        if len(durable) < copies_min:
            return Seq(0)
        return min(durable, default=Seq(0))

    def _durable_seq(self, server: ServerId) -> Seq:
        away = self.away.get(server)
        return self._durable.get(server, NEVER_SEEN) if away is None else away.durable_seq

    def _is_forgotten(self, server: ServerId, replicas: Sequence[ServerId]) -> bool:
        away = self.away.get(server)
        if away is None or away.away_s <= FORGET_S:
            return False
        ahead = [other for other in replicas if other != server and self._durable_seq(other) > away.durable_seq]
        return len(ahead) >= 2
