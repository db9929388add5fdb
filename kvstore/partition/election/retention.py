"""Decides how far a partition's log may be trimmed. Decides only.

Engines have no log of their own, so the limit is the sequence that a replica has synced, not the one that it has
applied: a power failure takes every engine back to its last sync, and the log must still continue from there
(docs/protocol.md, G6).

A replica that is away keeps the log from being trimmed, but not forever (docs/protocol.md, G20). Each leader adds up
for how long it has seen the replica away, and continues the former leader's count.
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
    """The sequence that the replica had synced when it last published."""
    away_s: float
    """Seconds for which leaders have seen it away; a lower bound."""


class LogRetention:
    """Tracks the sequence that each replica has synced, including replicas that are away."""

    def __init__(self, away: Mapping[ServerId, Away]) -> None:
        """`away` is what former leaders have counted."""
        self.away = dict(away)
        self._durable: dict[ServerId, Seq] = {}
        """Synced sequences of the replicas that are up."""

    def note(
        self,
        replicas: Sequence[ServerId],
        durable: Mapping[ServerId, Seq],
        elapsed_s: float,
        stopped: Mapping[ServerId, Seq] | None = None,
    ) -> None:
        """Record what the replicas that are up have published. All other replicas have been away for another
        `elapsed_s` seconds: the time since the last check during which this leader was awake. Replicas that are up but
        have `stopped` applying also count as away; otherwise they would hold the log forever."""
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
        """Return the highest sequence that has been synced by every replica that counts, and by at least `copies_min`
        replicas. The log may be trimmed up to there."""
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
