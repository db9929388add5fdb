"""Stored figures, and whether new ones have fallen behind them. Decides only.

A baseline is a small part of a run's document: totals, and how the run was made. Only like is compared with like: the
same options on a machine of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMAT = 1
LIKE = ("workload", "shape", "rate", "rate_per_user", "keys", "value_size", "keys_by", "doors", "level")
FIGURES = ("per_s", "achieved", "p50_ms", "p95_ms", "p99_ms", "service_p50_ms", "service_p99_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a figure may fall before it counts."""

    rate: float = 0.30
    """Of the stored rate."""
    latency: float = 1.0
    """Of the stored latency: 1 is twice as long. A shared machine moves that much by itself."""
    latency_ms: float = 5.0
    """And a rise by less than this is noise."""


class Line(NamedTuple):
    """One figure beside the stored one."""

    figure: str
    stored: float
    now: float
    limit: float
    is_fallen: bool


def baseline_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What to store of a run."""
    return {
        "format": FORMAT,
        "made": like_of(document),
        "machine": dict(document["machine"]),
        "figures": {name: document["total"][name] for name in FIGURES},
    }


def like_of(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: document["options"].get(name) for name in LIKE}


def differences(stored: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """Why the two must not be compared; empty if they may be. Raises ValueError if `stored` is no baseline."""
    if stored.get("format") != FORMAT:
        raise ValueError(f"want a baseline of format {FORMAT}, got {stored.get('format')!r}")
    now = like_of(document)
    found = [
        f"{name} was {stored['made'].get(name)!r} and is {now[name]!r}"
        for name in LIKE
        if stored["made"].get(name) != now[name]
    ]
    for name in ("cores", "processor"):
        was, is_ = stored["machine"].get(name), document["machine"].get(name)
        if was != is_:
            found.append(f"{name} was {was!r} and is {is_!r}")
    return found


def compare(stored: Mapping[str, Any], document: Mapping[str, Any], tolerance: Tolerance) -> list[Line]:
    """Each figure beside the stored one."""
    return [_line(name, stored["figures"][name], document["total"][name], tolerance) for name in FIGURES]


def _line(name: str, stored: float, now: float, tolerance: Tolerance) -> Line:
    if name.endswith("_ms"):
        limit = max(stored * (1 + tolerance.latency), stored + tolerance.latency_ms)
        return Line(name, stored, now, round(limit, 3), now > limit)
    limit = stored * (1 - tolerance.rate)
    return Line(name, stored, now, round(limit, 4), now < limit)
