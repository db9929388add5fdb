"""Numbers that settings may have: declared beside each setting, asked of its class when it is built, and shown in
docs/reference/configuration.md. Decides only."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`, both included, or from above `least`, or to below `most`."""

    least: float
    most: float = math.inf
    is_above: bool = False
    is_below: bool = False
    is_zero_allowed: bool = False
    """True if 0 is allowed although it is below `least`: it switches something off."""

    def admits(self, value: float) -> bool:
        """Tell whether the setting may be so. What is not a number, and infinity, never."""
        if self.is_zero_allowed and value == 0:
            return True
        if not math.isfinite(value) or value < self.least or value > self.most:
            return False
        return not (self.is_above and value == self.least) and not (self.is_below and value == self.most)

    def __str__(self) -> str:
        zero = "0, or " if self.is_zero_allowed else ""
        if math.isinf(self.most):
            return f"{zero}{'more than' if self.is_above else 'at least'} {plain(self.least)}"
        word = "to below" if self.is_below else "to"
        return f"{zero}{plain(self.least)} {word} {plain(self.most)}"


def at_least(least: float) -> Range:
    return Range(least)


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
    """The settings of a dataclass that have a range, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {field.name: range_of(hints[field.name]) for field in dataclasses.fields(cls)}
    return {name: each for name, each in found.items() if each is not None}


def range_of(hint: Any) -> Range | None:
    """The range in `Annotated[int, at_least(1)]`; None of any other type."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Range)), None)


def range_faults(settings: Any) -> list[str]:
    """Every setting of a dataclass whose number is out of its range, as `name: want …, got …`."""
    cls = settings.__class__
    return range_faults_of(cls, {name: getattr(settings, name) for name in ranges_of(cls)})


def range_faults_of(cls: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the same for some values of a dataclass that cannot be built."""
    return [
        f"{name}: want {each}, got {_shown(values[name])}"
        for name, each in ranges_of(cls).items()
        if name in values and not each.admits(values[name])
    ]


NEVER = "1e9"
"""Of seconds: thirty years."""
SECONDS_MAX = 10**9
MS_MAX = 10**12
"""The longest time of a setting: the one that says never. Sums of several still fit in 64 bits."""
COUNT_MAX = 10**6
BYTES_MAX = 1 << 40
"""The largest number, and the most bytes, of what nothing else bounds: more than one machine has."""
PERIOD_MIN_S = 0.05
"""The shortest time from one periodic check to the next: the event loop must have time for anything else."""


def _shown(value: float) -> str:
    """A number that is out of range. Infinity is in none: it cannot be waited for, stored or sent."""
    return f"{value}, which is no number; where 0 is not never, {NEVER} is" if math.isinf(value) else str(value)


class WrongSettings(ValueError):
    """Settings that their class refuses; `faults` has each, as `name: want …, got …` where one name is to blame."""

    def __init__(self, *faults: str) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults
