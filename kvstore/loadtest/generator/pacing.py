"""When operations should begin: open-loop schedules, one for each user. Decides only.

A schedule does not look at the store. What begins late because earlier operations took long is measured from when it
should have begun, so a stall is seen with its whole length and not as one slow operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How begins are spread over time."""

    is_even: bool = False
    """Even distances, each user at an offset of its own; else Poisson, as of many independent callers."""
    burst_s: float = 0.0
    every_s: float = 0.0
    """All of a user's begins of `every_s` seconds fall into the first `burst_s` of them; 0: no bursts. Counted on a
    clock that all users share, so their bursts meet."""


POISSON = Arrivals()
EVEN = Arrivals(is_even=True)
BURSTS = Arrivals(burst_s=1.0, every_s=5.0)


def begins(arrivals: Arrivals, per_s: float, since_s: float, random: Random) -> Iterator[float]:
    """When one user's operations should begin, from `since_s` on, at `per_s` on average. Endless, never falling."""
    if not per_s > 0:
        raise ValueError(f"want a rate above 0, got {per_s}")
    stretch = arrivals.burst_s / arrivals.every_s if arrivals.every_s else 1.0
    at = _busy(since_s, arrivals, stretch) + random.random() * stretch / per_s
    while True:
        yield _wall(at, arrivals)
        at += stretch / per_s if arrivals.is_even else random.expovariate(per_s / stretch)


def _busy(at_s: float, arrivals: Arrivals, stretch: float) -> float:
    """How much of the time until `at_s` was within bursts."""
    if stretch == 1.0:
        return at_s
    rounds, within = divmod(at_s, arrivals.every_s)
    return rounds * arrivals.burst_s + min(within, arrivals.burst_s)


def _wall(busy_s: float, arrivals: Arrivals) -> float:
    """The reverse of it."""
    if not arrivals.every_s:
        return busy_s
    rounds, within = divmod(busy_s, arrivals.burst_s)
    return rounds * arrivals.every_s + within
