"""Stored figures, and whether new ones have fallen behind them. Decides only.

A baseline is a small part of a run's document: totals, and how the run was made. Only like is compared with like: the
same options on a machine of the same kind. Latencies are compared as multiples of the machine's pulse, measured during
each run (pulse.py): in an hour in which everything takes three times as long, they may, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMAT = 2
LIKE = ("workload", "shape", "rate", "rate_per_user", "keys", "value_size", "keys_by", "doors", "level")
PULSES = {50: "pulse_p50_ms", 95: "pulse_p95_ms", 99: "pulse_p95_ms"}
"""Which of the pulse's figures goes with which percentile: tails grow more than medians where others are at work."""
FIGURES = ("per_s", "achieved", "p50_ms", "p95_ms", "p99_ms", "service_p50_ms", "service_p99_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a figure may fall before it counts."""

    rate: float = 0.30
    """Of the stored rate."""
    latency: float = 1.0
    """Of the stored latency at this pulse: 1 is twice as long."""
    latency_ms: float = 5.0
    """And a rise by less than this is noise."""


class Line(NamedTuple):
    """One figure beside the stored one."""

    figure: str
    stored: float
    pace: float
    """How many times slower the machine was than then; 1 for what does not depend on it."""
    now: float
    limit: float
    is_fallen: bool

    def row(self) -> dict[str, Any]:
        """As a table shows it."""
        row = {"figure": self.figure, "baseline": self.stored, "pace": self.pace, "limit": self.limit, "now": self.now}
        return {**row, "": "FALLEN" if self.is_fallen else "ok"}


def baseline_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What to store of a run. Raises ValueError for one that failed: later runs would be measured by it."""
    if not document["verdict"]["is_met"]:
        raise ValueError(f"want a run that was as it must be, got one that failed: {document['verdict']['reasons']}")
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
        raise ValueError(f"want a baseline of format {FORMAT}, got {stored.get('format')!r}: store a new one")
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
    for name in sorted(set(PULSES.values())):
        if not (stored["machine"].get(name) and document["machine"].get(name)):
            found.append(f"{name} was not measured")
    return found


def compare(stored: Mapping[str, Any], document: Mapping[str, Any], tolerance: Tolerance) -> list[Line]:
    """Each figure beside the stored one."""
    return [
        _line(name, stored["figures"][name], _pace(name, stored, document), document["total"][name], tolerance)
        for name in FIGURES
    ]


def _pace(name: str, stored: Mapping[str, Any], document: Mapping[str, Any]) -> float:
    if not name.endswith("_ms"):
        return 1.0
    pulse = PULSES[int(name.removeprefix("service_").removeprefix("p").removesuffix("_ms"))]
    return float(document["machine"][pulse]) / float(stored["machine"][pulse])


def _line(name: str, stored: float, pace: float, now: float, tolerance: Tolerance) -> Line:
    if name.endswith("_ms"):
        wanted = stored * pace
        limit = max(wanted * (1 + tolerance.latency), wanted + tolerance.latency_ms)
        return Line(name, stored, round(pace, 2), now, round(limit, 3), now > limit)
    limit = stored * (1 - tolerance.rate)
    return Line(name, stored, pace, now, round(limit, 4), now < limit)
