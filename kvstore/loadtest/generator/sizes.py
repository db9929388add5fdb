"""Seeded distributions of value sizes in bytes. Decides only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING

from kvstore.limits import VALUE_BYTES_MAX

if TYPE_CHECKING:
    from random import Random


Sizes = Callable[["Random"], int]
SIGMA_MAX = 10.0
"""At this sigma, one draw in six is over 22,000 times the median: for most medians, larger than any allowed value."""
FORMS = "100, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, or mix:100=90,10000=10"


def sizes_of(text: str) -> Sizes:
    """Return a function that draws sizes: `100` (always), `uniform:10:1000`, `lognormal:300:1.0` (median, and sigma of
    the logarithm), `mix:100=90,10000=10` (sizes and weights). Raises ValueError."""
    name, _, rest = text.partition(":")
    try:
        if name.isdecimal() and not rest:
            return _constant(_checked(int(name)))
        arguments = rest.split(":")
        if name == "uniform" and len(arguments) == 2:
            low, high = (_checked(int(each)) for each in arguments)
            return _uniform(low, high)
        if name == "lognormal" and len(arguments) == 2:
            return _lognormal(_checked(int(arguments[0])), float(arguments[1]))
        if name == "mix":
            pairs = [each.split("=") for each in rest.split(",")]
            return _mix([_checked(int(size)) for size, _ in pairs], [int(weight) for _, weight in pairs])
    except ValueError as error:
        raise ValueError(f"value sizes {text!r}: {error}; expected {FORMS}") from None
    raise ValueError(f"value sizes {text!r}: expected {FORMS}")


def _constant(size: int) -> Sizes:
    return lambda _: size


def _uniform(low: int, high: int) -> Sizes:
    if low > high:
        raise ValueError(f"LOW {low} is above HIGH {high}")
    return lambda random: low + int(random.random() * (high - low + 1))


def _lognormal(median: int, sigma: float) -> Sizes:
    if not 0 <= sigma <= SIGMA_MAX:
        raise ValueError(f"expected a sigma from 0 to {SIGMA_MAX:g}, got {sigma:g}")
    centre = log(max(1, median))
    return lambda random: min(VALUE_BYTES_MAX, max(1, round(random.lognormvariate(centre, sigma))))


def _mix(sizes: list[int], weights: list[int]) -> Sizes:
    if min(weights) < 1:
        raise ValueError("weights must be at least 1")
    odds = list(accumulate(weights))
    return lambda random: random.choices(sizes, cum_weights=odds)[0]


def _checked(size: int) -> int:
    if not 0 <= size <= VALUE_BYTES_MAX:
        raise ValueError(f"expected sizes from 0 to {VALUE_BYTES_MAX} bytes, got {size}")
    return size
