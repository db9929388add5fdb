"""Ranges of numeric settings. Each range is declared with its setting, checked when the settings are built, and shown
in docs/reference/configuration.md. Decides only."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`. Both ends are included unless `is_above` or `is_below` excludes them."""

    least: float
    most: float = math.inf
    is_above: bool = False
    is_below: bool = False
    is_zero_allowed: bool = False
    """True if 0 is allowed although it is below `least`: it switches a feature off."""

    def admits(self, value: float) -> bool:
        """Return True if the setting may have this value. NaN and infinity are never allowed."""
        if self.is_zero_allowed and value == 0:
            return True
        if not self.least <= value <= self.most or value == math.inf:
            return False
        return not (self.is_above and value == self.least) and not (self.is_below and value == self.most)

    def __str__(self) -> str:
        zero = "0, or " if self.is_zero_allowed else ""
        if math.isinf(self.most):
            return f"{zero}{'more than' if self.is_above else 'at least'} {plain(self.least)}"
        word = "to below" if self.is_below else "to"
        return f"{zero}{plain(self.least)} {word} {plain(self.most)}"


def above(least: float) -> Range:
    return Range(least, is_above=True)


def between(least: float, most: float) -> Range:
    return Range(least, most)


def zero_or(least: float, most: float) -> Range:
    return Range(least, most, is_zero_allowed=True)


def plain(number: float) -> str:
    """Format a number without an exponent, and without .0."""
    return str(int(number)) if number == int(number) else repr(number)


@functools.cache
def ranges_of(cls: Any) -> dict[str, Range]:
    """Return the ranges of a dataclass's settings by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {field.name: range_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return {name: each for name, each in found.items() if each is not None}


def range_of(hint: Any) -> Range | None:
    """Return the range in `Annotated[int, between(1, 9)]`; None for any other type."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)), None)


def range_faults(settings: Any) -> list[str]:
    """Return the settings of a dataclass that are out of range, as `name: expected …, got …`."""
    cls = settings.__class__
    return range_faults_of(cls, {name: getattr(settings, name) for name in ranges_of(cls)})


def range_faults_of(cls: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the values that are out of range, for a dataclass that cannot be built."""
    return [
        f"{name}: expected {each}, got {_shown(values[name])}"
        for name, each in ranges_of(cls).items()
        if name in values and not each.admits(values[name])
    ]


NEVER = "1e9"
"""Thirty years in seconds."""
SECONDS_MAX = 10**9
MS_MAX = 10**12
"""Longest time of a setting; it means never. Sums of several such times still fit into 64 bits."""
COUNT_MAX = 10**6
BYTES_MAX = 1 << 40
"""Largest number, and most bytes, of settings without their own bound: more than one machine has."""
PERIOD_MIN_S = 0.05
"""Shortest interval of a periodic check. A shorter one would starve the event loop."""


def _shown(value: float) -> str:
    """Format a number that is out of range. Infinity is never in range, because it cannot be waited for, stored or
    sent."""
    is_infinite = abs(value) == math.inf
    return f"{value}, which is not a number; for never, use 0 or {NEVER}" if is_infinite else str(value)


class WrongSettings(ValueError):
    """Settings that their class rejects. `faults` has each fault, as `name: expected …, got …` if one name is at
    fault."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
