"""Delays between attempts, with full jitter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


def delays(rng: Random, *, first_s: float, cap_s: float, factor: float = 2.0) -> Iterator[float]:
    """Yield the seconds to wait before the second, third, ... attempt, without end. Each delay is drawn evenly from
    zero to a bound. The bound starts at `first_s`, grows by `factor` after each attempt and stops at `cap_s`. Full
    jitter spreads callers that failed at the same time."""
    if not 0 < first_s <= cap_s or factor < 1:
        raise ValueError(f"expected 0 < first_s <= cap_s and factor >= 1, got {first_s}, {cap_s}, {factor}")
    bound = first_s
    while True:
        yield rng.uniform(0, bound)
        bound = min(bound * factor, cap_s)
