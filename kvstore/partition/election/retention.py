"""Decides how far a partition's log may be trimmed. Decides only.

Engines run without a log of their own, so what counts is what a replica has synced, not what it has applied: a power
cut takes every engine back to its last sync, and the log must still reach from there (docs/protocol.md, G6).

A replica that is away holds the log, but not forever (docs/protocol.md, G20): leaders add up for how long they have
seen it away, each continuing the former leader's count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.types import Seq, ServerId

FORGET_S = 24 * 3600.0
"""A replica that has been away for more than this many seconds stops holding the log, if enough others have what it is
missing. It installs a snapshot later."""
NEVER_SEEN = Seq(0)


@dataclass(frozen=True, slots=True)
class Away:
    """A replica that does not publish its progress."""

    durable_seq: Seq
    """Sequence that it had synced when it last published."""
    away_s: float
    """Seconds for which leaders have seen it away; a lower bound."""


class LogRetention:
    """Remembers what each replica has synced, including those that are away."""

    def __init__(self, away: Mapping[ServerId, Away]) -> None:
        """`away` is what former leaders have counted."""
        self.away = dict(away)
        self._durable: dict[ServerId, Seq] = {}
        """Synced sequences of the replicas that are up."""

    def look(
        self,
        replicas: Sequence[ServerId],
        durable: Mapping[ServerId, Seq],
        elapsed_s: float,
        stopped: Mapping[ServerId, Seq] | None = None,
    ) -> None:
        """Note what the replicas that are up have published. All others have been away for `elapsed_s` more seconds:
        the time since the last check, as far as this leader was awake. Replicas that are up but have `stopped` applying
        count as away too; otherwise they would hold the log forever."""
        stopped = stopped or {}
        away: dict[ServerId, Away] = {}
        for server in replicas:
            if server in durable:
                continue
            before = self.away.get(server)
            if before is None:
                before = Away(self._durable.get(server, stopped.get(server, NEVER_SEEN)), 0.0)
            away[server] = Away(before.durable_seq, before.away_s + elapsed_s)
        # The sequence is lower than before if a replica was wiped: the new claim is the true one.
        self.away, self._durable = away, dict(durable)

    def floor(self, replicas: Sequence[ServerId], copies_min: int) -> Seq:
        """Return the highest sequence up to which the state of every replica that counts is synced, and of at least
        `copies_min` replicas."""
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
