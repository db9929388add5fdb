"""Newcomers that get no further, and servers that are chosen last because one of theirs was given up. Decides only; the
steward tells what they have published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.types import PartitionId, Seq, ServerId

STUCK_S = 600.0
"""A newcomer that has got no further for so long, beside replicas that it could follow, gets no further: its disk is
full, or it has stopped. One that takes in another's state tells how much it has."""
QUIET_S = 60.0
"""One that only follows the log is held to it if another replica got further in so long: perhaps nobody can read it."""
REST_S, RESTS_S_MAX = 3_600.0, 86_400.0
"""How long the server of one that was given up is chosen last: twice as long each time, up to the most."""

Pair = tuple[PartitionId, ServerId]


class Stand(NamedTuple):
    """How far a newcomer is."""

    taken: tuple[int, int]
    """As it has published it; later ones are greater."""
    others: Seq | None
    """How far the furthest other replica is, if it follows the log as that one does."""


NOTHING = Stand((-1, 0), None)
"""Of one that has published nothing."""


@dataclass(slots=True)
class _Watched:
    """A newcomer, over time."""

    taken: tuple[int, int]
    """The furthest."""
    since: float
    others: Seq | None
    others_since: float

    def is_stuck(self, now: float) -> bool:
        return now - self.since >= STUCK_S

    def note(self, stand: Stand, now: float) -> None:
        if stand.others is None or stand.others != self.others:
            self.others, self.others_since = stand.others, now
        if stand.taken > self.taken or now - self.others_since >= QUIET_S:
            self.taken, self.since = max(self.taken, stand.taken), now


class Newcomers:
    """The newcomers of all partitions as one process has seen them, by its monotonic clock."""

    def __init__(self) -> None:
        self._watched: dict[Pair, _Watched] = {}
        self._rests: dict[ServerId, tuple[int, float]] = {}
        """How often one there was given up, and until when the server rests."""

    def note(self, stands: Mapping[Pair, Stand], now: float) -> None:
        """Note how far those are that can be judged now; what was known of others is forgotten."""
        before = self._watched
        self._watched = {
            pair: before.get(pair) or _Watched(stand.taken, now, stand.others, now) for pair, stand in stands.items()
        }
        for pair, stand in stands.items():
            self._watched[pair].note(stand, now)

    def forget(self) -> None:
        """How far anybody is cannot be told: nobody counts as stuck."""
        self._watched = {}

    def stuck(self, now: float) -> frozenset[Pair]:
        """Return those that have got no further for long."""
        return frozenset(pair for pair, watched in self._watched.items() if watched.is_stuck(now))

    def resting(self, now: float) -> frozenset[ServerId]:
        """Return the servers that are chosen last."""
        return frozenset(server for server, (_, until) in self._rests.items() if now < until)

    def given_up(self, server: ServerId, now: float) -> None:
        """One on this server got no further."""
        count = self._rests.get(server, (0, 0.0))[0]
        self._rests[server] = (count + 1, now + min(REST_S * 2**count, RESTS_S_MAX))

    def caught_up(self, server: ServerId) -> None:
        """One on this server has taken its place."""
        self._rests.pop(server, None)
