"""Tracks newcomers that make no progress, and servers on which a newcomer was cancelled and which are therefore
chosen last. Decides only; the steward provides the progress that newcomers have published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.types import PartitionId, Seq, ServerId

STUCK_S = 600.0
"""Time without progress, while other replicas could be followed, after which a newcomer counts as stuck: its disk is
full or it has stopped. A newcomer that installs a snapshot reports its progress."""
QUIET_S = 60.0
"""Time without progress of the other replicas after which a following newcomer is not blamed: perhaps no replica can
read the log."""
PAUSE_S, PAUSE_S_MAX = 3_600.0, 86_400.0
"""Time for which the server of a cancelled newcomer is chosen last. It doubles each time, up to the maximum."""

Pair = tuple[PartitionId, ServerId]


class Progress(NamedTuple):
    """The progress of a newcomer in catching up, and the progress of the most advanced other replica."""

    taken: tuple[int, int]
    """Progress as published by the newcomer; a larger value is later."""
    others: Seq | None
    """Sequence of the most advanced other replica, or None if the newcomer does not follow the log yet."""


NOTHING = Progress((-1, 0), None)
"""The state of a newcomer that has published nothing."""


@dataclass(slots=True)
class _Watched:
    """A newcomer, observed over time."""

    taken: tuple[int, int]
    """The furthest progress."""
    since: float
    others: Seq | None
    others_since: float

    def is_stuck(self, now: float) -> bool:
        return now - self.since >= STUCK_S

    def note(self, progress: Progress, now: float) -> None:
        if progress.others is None or progress.others != self.others:
            self.others, self.others_since = progress.others, now
        if progress.taken > self.taken or now - self.others_since >= QUIET_S:
            self.taken, self.since = max(self.taken, progress.taken), now


class Newcomers:
    """The newcomers of all partitions, as one process observes them with its monotonic clock."""

    def __init__(self) -> None:
        self._watched: dict[Pair, _Watched] = {}
        self._paused: dict[ServerId, tuple[int, float]] = {}
        """Number of cancelled newcomers on each server, and the time until which the server is chosen last."""

    def note(self, by_pair: Mapping[Pair, Progress], now: float) -> None:
        """Record the progress of the newcomers that can be judged now. All other newcomers are forgotten."""
        before = self._watched
        self._watched = {
            pair: before.get(pair) or _Watched(progress.taken, now, progress.others, now)
            for pair, progress in by_pair.items()
        }
        for pair, progress in by_pair.items():
            self._watched[pair].note(progress, now)

    def forget(self) -> None:
        """Forget the recorded progress, because the current progress is unknown. Afterwards no newcomer counts as
        stuck."""
        self._watched = {}

    def stuck(self, now: float) -> frozenset[Pair]:
        """Return the newcomers that have made no progress for STUCK_S seconds."""
        return frozenset(pair for pair, watched in self._watched.items() if watched.is_stuck(now))

    def resting(self, now: float) -> frozenset[ServerId]:
        """Return the servers that are chosen last at the time `now`."""
        return frozenset(server for server, (_, until) in self._paused.items() if now < until)

    def given_up(self, server: ServerId, now: float) -> None:
        """Record that a stuck newcomer on this server was cancelled."""
        count = self._paused.get(server, (0, 0.0))[0]
        self._paused[server] = (count + 1, now + min(PAUSE_S * 2**count, PAUSE_S_MAX))

    def caught_up(self, server: ServerId) -> None:
        """Record that a newcomer on this server has replaced a replica."""
        self._paused.pop(server, None)
