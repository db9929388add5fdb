"""Newcomers that get no further, and servers that are chosen last because one of theirs was given up. Decides only; the
steward tells what they have published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.types import PartitionId, ServerId

STUCK_S = 600.0
"""A newcomer that has got no further for so long, beside replicas that it could follow, gets no further: its disk is
full, or it has stopped. One that takes in another's state tells how much it has."""
REST_S, RESTS_S_MAX = 3_600.0, 86_400.0
"""How long the server of one that was given up is chosen last: twice as long each time, up to the most."""

Pair = tuple[PartitionId, ServerId]


class Stand(NamedTuple):
    """How far a newcomer is. Later stands are greater."""

    seq: int
    installed_bytes: int = 0


NOTHING = Stand(-1)
"""Of one that has published nothing."""


class Newcomers:
    """The newcomers of all partitions as one process has seen them, by its monotonic clock."""

    def __init__(self) -> None:
        self._furthest: dict[Pair, tuple[Stand, float]] = {}
        """And since when."""
        self._rests: dict[ServerId, tuple[int, float]] = {}
        """How often one there was given up, and until when the server rests."""

    def note(self, stands: Mapping[Pair, Stand], now: float) -> None:
        """Note how far those are that can be judged now; what was known of others is forgotten."""
        before = self._furthest
        self._furthest = {}
        for pair, stand in stands.items():
            known = before.get(pair)
            self._furthest[pair] = known if known is not None and stand <= known[0] else (stand, now)

    def forget(self) -> None:
        """How far anybody is cannot be told: nobody counts as stuck."""
        self._furthest = {}

    def stuck(self, now: float) -> frozenset[Pair]:
        """Return those that have got no further for long."""
        return frozenset(pair for pair, (_, since) in self._furthest.items() if now - since >= STUCK_S)

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
