"""Open-loop schedules: when the operations of one user should begin. Decides only.

A schedule does not depend on the store. An operation that begins late because earlier ones took long is measured from
when it should have begun. So a stall shows at its full length and not as one slow operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The distribution of start times."""

    is_even: bool = False
    """True for even intervals, with an offset per user; False for Poisson arrivals, as from many independent
    callers."""
    burst_s: float = 0.0
    every_s: float = 0.0
    """All starts of `every_s` seconds fall into their first `burst_s` seconds; 0 means no bursts. All users share one
    clock, so their bursts coincide."""


POISSON = Arrivals()
EVEN = Arrivals(is_even=True)
BURSTS = Arrivals(burst_s=1.0, every_s=5.0)


def begins(arrivals: Arrivals, per_s: float, since_s: float, random: Random) -> Iterator[float]:
    """Yield when one user's operations should begin, from `since_s`, at `per_s` on average. Endless and ascending."""
    if not per_s > 0:
        raise ValueError(f"expected a rate above 0, got {per_s}")
    stretch = arrivals.burst_s / arrivals.every_s if arrivals.every_s else 1.0
    at = _busy(since_s, arrivals, stretch) + random.random() * stretch / per_s
    while True:
        yield _wall(at, arrivals)
        at += stretch / per_s if arrivals.is_even else random.expovariate(per_s / stretch)


def _busy(at_s: float, arrivals: Arrivals, stretch: float) -> float:
    """Return how much of the time until `at_s` was within bursts."""
    if stretch == 1.0:
        return at_s
    rounds, within = divmod(at_s, arrivals.every_s)
    return rounds * arrivals.burst_s + min(within, arrivals.burst_s)


def _wall(busy_s: float, arrivals: Arrivals) -> float:
    """Return the time at which `busy_s` seconds of bursts have passed: the inverse of `_busy`."""
    if not arrivals.every_s:
        return busy_s
    rounds, within = divmod(busy_s, arrivals.burst_s)
    return rounds * arrivals.every_s + within
