"""Sizes, counts and times in the form in which people read them. Decides only."""

from __future__ import annotations


def count(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things, for example `1 node` or `1,200 keys`. The plural has an s if none is given."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def size(number: float) -> str:
    """Return a number of bytes in the unit that needs the fewest digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "B" or number >= 10 else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def span(seconds: float) -> str:
    """Return a time in the unit that needs the fewest digits."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
