"""The target rate over a run: steady, step, spike, soak, and the search for the knee. Decides only.

A shape is asked once a second for the rate, and returns None when the run is over. Rates become numbers of users, each
of which follows its own schedule; see pacing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAMES = ("steady", "step", "spike", "soak", "knee", "chaos")
STEPS = 5
SPIKE_FACTOR = 4.0
RAMP_SHARE = 0.1
"""Share of a soak during which the rate rises."""


class RecentResults(NamedTuple):
    """The results of the latest seconds."""

    due_per_s: float
    """The rate that the schedules of all users hold."""
    done_per_s: float
    """Operations of these schedules that are done by now, per second."""
    p99_ms: float
    errors: int


RecentResultsOf = Callable[[float], RecentResults | None]
"""Returns the results of the latest so many seconds, or None if users have not run that long at the current rate. Costs
time in proportion to the operations of these seconds."""


class Shape(Protocol):
    """A curve of the rate over time."""

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        """Return the wanted operations per second `at_s` after the start, or None at the end."""
        ...


@dataclass(frozen=True, slots=True)
class SteadyShape:
    """One rate all the time. Also used for chaos, where the cluster changes."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        return self.per_s if at_s < self.seconds else None


@dataclass(frozen=True, slots=True)
class StepShape:
    """A rise to the rate in equal steps of equal length."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (1 + int(at_s / self.seconds * STEPS)) / STEPS


@dataclass(frozen=True, slots=True)
class SpikeShape:
    """The rate, but several times as much in the middle fifth."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (SPIKE_FACTOR if 0.4 <= at_s / self.seconds < 0.6 else 1.0)


@dataclass(frozen=True, slots=True)
class SoakShape:
    """A slow rise to the rate, then the rate for the rest of the run: finds leaks and accumulation."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * min(1.0, max(0.1, at_s / (self.seconds * RAMP_SHARE)))


class KneeTrial(NamedTuple):
    """One rate of the search, and its results."""

    per_s: float
    due_per_s: float
    """`per_s`, rounded up to whole users."""
    done_per_s: float
    p99_ms: float
    errors: int
    is_carried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeLimits:
    """The conditions under which a rate counts as sustained."""

    achieved_min: float = 0.99
    """Minimum share of due operations that are done."""
    p99_ms_max: float = 100.0
    trial_s: float = 10.0
    """Seconds for which each rate is measured once its users run."""
    factor: float = 1.5
    """Factor from a sustained rate to the next trial."""
    finer: int = 2
    """Number of times the gap is halved after a rate was not sustained."""
    calm_s: float = 3.0
    """Seconds for which the rate of a pause must be sustained before the next trial."""
    rest_s_max: float = 60.0


class KneeShape:
    """Searches the highest rate that the store sustains. Raises the rate by a factor until one is not sustained, then
    halves the gap a few times. Ends after `seconds` in any case.

    Overloaded users are late, and stay late at a lower rate until they have caught up. So after a rate that was not
    sustained, the search pauses at half the sustained rate until no operation is late.
    """

    def __init__(self, per_s: float, seconds: float, limits: KneeLimits | None = None) -> None:
        self._seconds = seconds
        self._limits = limits or KneeLimits()
        self.trials: list[KneeTrial] = []
        self._per_s = per_s
        """The rate of the current trial, or of the trial after the pause."""
        self._rests_since_s: float | None = None
        self._carried, self._failed = 0.0, 0.0
        self._finer_left = self._limits.finer

    @property
    def sustained_per_s(self) -> float:
        """The highest rate that was sustained; 0 if none was."""
        return self._carried

    @property
    def failed_per_s(self) -> float:
        """The lowest rate that was not sustained; 0 if all were."""
        return self._failed

    @property
    def missing(self) -> str | None:
        """Why no knee was found; None if one was found."""
        if self._carried and self._failed:
            return None
        if self._carried:
            return f"the knee was not found: the run ended while {self._carried:g}/s were still sustained"
        if self._failed:
            return f"the knee was not found: no rate was sustained, not even {self._failed:g}/s"
        return "the knee was not found: the run ended before any rate was judged"

    def rate(self, at_s: float, recent: RecentResultsOf) -> float | None:
        if at_s >= self._seconds:
            return None
        if self._rests_since_s is not None:
            return self._rest(at_s, self._rests_since_s, recent)
        seen = recent(self._limits.trial_s)
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

    def _rest(self, at_s: float, since_s: float, recent: RecentResultsOf) -> float | None:
        seen = recent(self._limits.calm_s)
        if seen is not None and self._is_sustained(seen):
            self._rests_since_s = None
            return self._per_s
        return self._rest_per_s if at_s - since_s < self._limits.rest_s_max else None

    @property
    def _rest_per_s(self) -> float:
        return (self._carried or self._per_s) / 2

    def _is_sustained(self, seen: RecentResults) -> bool:
        limits = self._limits
        is_achieved = seen.done_per_s >= limits.achieved_min * seen.due_per_s
        return is_achieved and seen.p99_ms <= limits.p99_ms_max and not seen.errors

    def _judge(self, seen: RecentResults) -> None:
        is_carried = self._is_sustained(seen)
        self.trials.append(KneeTrial(self._per_s, *seen, is_carried))
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
    """Return the shape with this name. Raises ValueError."""
    match name:
        case "steady" | "chaos":
            return SteadyShape(per_s, seconds)
        case "step":
            return StepShape(per_s, seconds)
        case "spike":
            return SpikeShape(per_s, seconds)
        case "soak":
            return SoakShape(per_s, seconds)
        case "knee":
            return KneeShape(per_s, seconds)
    raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
