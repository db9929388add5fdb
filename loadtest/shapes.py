"""How the target rate moves over a run: steady, step, spike, soak, and the search for the knee. Decides only.

A shape is asked once a second for the rate it wants, and gives None when the run is over. Rates become numbers of
users, each of whom keeps a schedule of its own; see pacing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAMES = ("steady", "step", "spike", "soak", "knee", "chaos")
STEPS = 5
SPIKE_FACTOR = 4.0
RAMP_SHARE = 0.1
"""Of a soak: how long the rate rises at its begin."""


class Seen(NamedTuple):
    """What came of the latest seconds."""

    done_per_s: float
    p99_ms: float
    errors: int


class Shape(Protocol):
    """Where the rate goes."""

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        """Operations per second wanted `at_s` after the begin; None: the end. `seen` covers the time since the rate was
        last changed, without the seconds that it took to settle; None while it is too early to tell."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """One rate all the time. Chaos uses it, too: what moves there is the cluster."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        return self.per_s if at_s < self.seconds else None


@dataclass(frozen=True, slots=True)
class Step:
    """Up to the rate in equal steps of equal length."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (1 + int(at_s / self.seconds * STEPS)) / STEPS


@dataclass(frozen=True, slots=True)
class Spike:
    """The rate, with several times as much in the fifth in the middle."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * (SPIKE_FACTOR if 0.4 <= at_s / self.seconds < 0.6 else 1.0)


@dataclass(frozen=True, slots=True)
class Soak:
    """A slow rise to the rate, then the rate for the rest: for leaks and for what accumulates."""

    per_s: float
    seconds: float

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        if at_s >= self.seconds:
            return None
        return self.per_s * min(1.0, max(0.1, at_s / (self.seconds * RAMP_SHARE)))


class Trial(NamedTuple):
    """One rate of the search, and what came of it."""

    per_s: float
    done_per_s: float
    p99_ms: float
    errors: int
    is_carried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a carried rate looks like."""

    achieved_min: float = 0.99
    """Of the target."""
    p99_ms_max: float = 100.0
    trial_s: float = 12.0
    """How long each rate is held."""
    factor: float = 1.5
    """From one carried rate to the next trial."""
    finer: int = 2
    """Halvings of the gap once a rate was not carried."""


class Knee:
    """Looks for the highest rate that the store carries: rises by a factor until a rate is not carried, then halves the
    gap a few times. Ends after `seconds` in any case."""

    def __init__(self, per_s: float, seconds: float, limits: Limits | None = None) -> None:
        self._seconds = seconds
        self._limits = limits or Limits()
        self.trials: list[Trial] = []
        self._per_s = per_s
        self._since_s = 0.0
        self._carried, self._failed = 0.0, 0.0
        self._finer_left = self._limits.finer

    @property
    def carried_per_s(self) -> float:
        """The highest rate that was carried; 0: none was."""
        return self._carried

    def rate(self, at_s: float, seen: Seen | None) -> float | None:
        if at_s >= self._seconds:
            return None
        if seen is None or at_s - self._since_s < self._limits.trial_s:
            return self._per_s
        self._judge(seen)
        following = self._following()
        if following is None:
            return None
        self._per_s, self._since_s = following, at_s
        return self._per_s

    def _judge(self, seen: Seen) -> None:
        limits = self._limits
        is_carried = (
            seen.done_per_s >= limits.achieved_min * self._per_s
            and seen.p99_ms <= limits.p99_ms_max
            and not seen.errors
        )
        self.trials.append(Trial(self._per_s, seen.done_per_s, seen.p99_ms, seen.errors, is_carried))
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
