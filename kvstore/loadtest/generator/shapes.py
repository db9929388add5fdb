"""How the target rate moves over a run: steady, step, spike, soak, and the search for the knee. Decides only.

A shape is asked once a second for the rate it wants, and gives None when the run is over. Rates become numbers of
users, each of whom keeps a schedule of its own; see pacing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAMES = ("steady", "step", "spike", "soak", "knee", "chaos")
STEPS = 5
SPIKE_FACTOR = 4.0
RAMP_SHARE = 0.1
"""Of a soak: how long the rate rises at its begin."""


class Seen(NamedTuple):
    """The results of the latest seconds."""

    due_per_s: float
    """What the timetables of all users hold."""
    done_per_s: float
    """Of these, done by now."""
    p99_ms: float
    errors: int


Look = Callable[[float], Seen | None]
"""What came of the latest so many seconds; None if it is too early: the users for the latest rate have not run so long.
Costs as much as the seconds hold."""


class Shape(Protocol):
    """Where the rate goes."""

    def rate(self, at_s: float, look: Look) -> float | None:
        """Operations per second wanted `at_s` after the begin; None: the end."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """One rate all the time. Chaos uses it, too: what moves there is the cluster."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, look: Look) -> float | None:
        return self.per_s if at_s < self.seconds else None


@dataclass(frozen=True, slots=True)
class Step:
    """Up to the rate in equal steps of equal length."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, look: Look) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (1 + int(at_s / self.seconds * STEPS)) / STEPS


@dataclass(frozen=True, slots=True)
class Spike:
    """The rate, with several times as much in the fifth in the middle."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, look: Look) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (SPIKE_FACTOR if 0.4 <= at_s / self.seconds < 0.6 else 1.0)


@dataclass(frozen=True, slots=True)
class Soak:
    """A slow rise to the rate, then the rate for the rest: for leaks and for what accumulates."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, look: Look) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * min(1.0, max(0.1, at_s / (self.seconds * RAMP_SHARE)))


class Trial(NamedTuple):
    """One rate of the search, and what came of it."""

    per_s: float
    due_per_s: float
    """As `per_s`, with the last user's share whole."""
    done_per_s: float
    p99_ms: float
    errors: int
    is_carried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The conditions under which a rate counts as carried."""

    achieved_min: float = 0.99
    """Of what is due."""
    p99_ms_max: float = 100.0
    trial_s: float = 10.0
    """How long each rate is looked at, once its users run."""
    factor: float = 1.5
    """From one carried rate to the next trial."""
    finer: int = 2
    """Halvings of the gap once a rate was not carried."""
    calm_s: float = 3.0
    """How long the rate of a rest must be carried before the next trial."""
    rest_s_max: float = 60.0


class Knee:
    """Looks for the highest rate that the store carries: rises by a factor until a rate is not carried, then halves the
    gap a few times. Ends after `seconds` in any case.

    Users that were overloaded are late, and stay late at a lower rate until they have caught up. So after a rate that
    was not carried there is a rest, at half the carried one, until nothing is late any more.
    """

    def __init__(self, per_s: float, seconds: float, limits: Limits | None = None) -> None:
        self._seconds = seconds
        self._limits = limits or Limits()
        self.trials: list[Trial] = []
        self._per_s = per_s
        """Of the trial that runs, or of the one after the rest."""
        self._rests_since_s: float | None = None
        self._carried, self._failed = 0.0, 0.0
        self._finer_left = self._limits.finer

    @property
    def carried_per_s(self) -> float:
        """The highest rate that was carried; 0: none was."""
        return self._carried

    @property
    def failed_per_s(self) -> float:
        """The lowest rate that was not carried; 0: all were."""
        return self._failed

    @property
    def missing(self) -> str | None:
        """Why no knee was found; None: one was."""
        if self._carried and self._failed:
            return None
        if self._carried:
            return f"the knee was not found: the run was over while {self._carried:g}/s were still carried"
        if self._failed:
            return f"the knee was not found: no rate was carried, not even {self._failed:g}/s"
        return "the knee was not found: the run was over before any rate was judged"

    def rate(self, at_s: float, look: Look) -> float | None:
        if at_s >= self._seconds:
            return None
        if self._rests_since_s is not None:
            return self._rest(at_s, self._rests_since_s, look)
        seen = look(self._limits.trial_s)
        if seen is None:
            return self._per_s
        self._judge(seen)
        following = self._following()
        if following is None:
            return None
        self._per_s = following
        if self.trials[-1].is_carried:
            return following
        self._rests_since_s = at_s
        return self._rest_per_s

    def _rest(self, at_s: float, since_s: float, look: Look) -> float | None:
        seen = look(self._limits.calm_s)
        if seen is not None and self._is_carried(seen):
            self._rests_since_s = None
            return self._per_s
        return self._rest_per_s if at_s - since_s < self._limits.rest_s_max else None

    @property
    def _rest_per_s(self) -> float:
        return (self._carried or self._per_s) / 2

    def _is_carried(self, seen: Seen) -> bool:
        limits = self._limits
        is_achieved = seen.done_per_s >= limits.achieved_min * seen.due_per_s
        return is_achieved and seen.p99_ms <= limits.p99_ms_max and not seen.errors

    def _judge(self, seen: Seen) -> None:
        is_carried = self._is_carried(seen)
        self.trials.append(Trial(self._per_s, *seen, is_carried))
        if is_carried:
            self._carried = max(self._carried, self._per_s)
        else:
            self._failed = self._per_s

    def _following(self) -> float | None:
        if not self._failed:
            return self._per_s * self._limits.factor
        if not self._finer_left:
            return None
        self._finer_left -= 1
        return (self._carried + self._failed) / 2


def shape_of(name: str, per_s: float, seconds: float) -> Shape:
    """Raises ValueError."""
    match name:
        case "steady" | "chaos":
            return Steady(per_s, seconds)
        case "step":
            return Step(per_s, seconds)
        case "spike":
            return Spike(per_s, seconds)
        case "soak":
            return Soak(per_s, seconds)
        case "knee":
            return Knee(per_s, seconds)
    raise ValueError(f"want one of {', '.join(NAMES)}, got {name!r}")
