"""Compares a run's figures with a stored baseline. Decides only.

A baseline is a small part of a run's document: rates, each operation at each endpoint, and the conditions of the run.
Two runs are compared only if they used the same options and cluster on the same kind of machine. Latencies are compared
as multiples of the machine's pulse, which is measured before the users of each run start (pulse.py): if everything on
the machine takes twice as long, latencies may, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMAT = 4
ASIDE = ("seed", "prefix", "data_dir", "report", "baseline", "errors_max", "achieved_min", "p99_ms")
"""Options in which two comparable runs may differ. They must agree in all others."""
LENGTHS = ("seconds", "warmup")
"""Runs with a steady rate may differ in these, too. Other shapes stretch over the length of the run."""
PULSES = {"p50_ms": "pulse_p50_ms", "p99_ms": "pulse_p95_ms"}
"""The pulse figure that scales each latency. Other load on the machine raises tails more than medians."""
PACE_MAX = 3.0
"""Maximum factor by which a slow machine scales latency limits. A faster machine does not lower them."""
FIGURES = ("per_s", "achieved")
COUNT_MIN = 1_000
"""An operation with fewer samples, then or now, is shown but not judged."""
LATENCY_TOLERANCE_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a figure may fall behind. Raises ValueError for a tolerance that would accept everything."""

    rate: float = 0.30
    """Share of the stored rate that may be lost."""
    latency: float = 1.0
    """Relative rise of the stored latency, scaled by the pulse: 1 allows twice as long."""
    median_ms: float = 1.0
    """A smaller rise of a median is noise. `tail_ms` is the same for p99."""
    tail_ms: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"expected a rate tolerance from 0 to 1, got {self.rate:g}; 0.3 is 30 %")
        if not 0 <= self.latency <= LATENCY_TOLERANCE_MAX:
            want = f"expected a latency tolerance from 0 to {LATENCY_TOLERANCE_MAX:g}"
            raise ValueError(f"{want}, got {self.latency:g}; 1 allows twice as long")


class FigureChange(NamedTuple):
    """One figure compared with the stored one."""

    figure: str
    stored: float
    pace: float
    """How many times slower the machine is than for the baseline; 1 for figures that do not depend on it."""
    now: float
    limit: float
    is_fallen: bool
    is_judged: bool = True

    def row(self) -> dict[str, Any]:
        """Return the figure as a table row."""
        row = {"figure": self.figure, "baseline": self.stored, "pace": self.pace, "limit": self.limit, "now": self.now}
        return {**row, "": "WORSE" if self.is_fallen else "ok" if self.is_judged else "too few"}


class Comparison(NamedTuple):
    """The comparison of the figures of two runs."""

    lines: list[FigureChange]
    notes: list[str]

    @property
    def falls(self) -> list[str]:
        """Return a sentence for each figure that got worse."""
        return [
            f"{line.figure} got worse: {line.now:g}, baseline {line.stored:g}, limit {line.limit:g}"
            for line in self.lines
            if line.is_fallen
        ]


def baseline_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run that is stored. Raises ValueError if the run failed."""
    if not document["verdict"]["is_met"]:
        why = [*document["verdict"]["reasons"], *document["verdict"].get("spoiled", [])]
        raise ValueError(f"expected a run that met its goals, got one that failed or was spoiled: {why}")
    kept = ("endpoint", "operation", "count", "per_s", *PULSES)
    return {
        "format": FORMAT,
        "made": like_of(document),
        "machine": dict(document["machine"]),
        "figures": {name: document["total"][name] for name in FIGURES},
        "operations": [{name: each[name] for name in kept} for each in document["operations"]],
    }


def like_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties in which two comparable runs agree."""
    return _without_asides(document["options"])


def _without_asides(options: Mapping[str, Any]) -> dict[str, Any]:
    aside = (*ASIDE, *LENGTHS) if options.get("shape") == "steady" else ASIDE
    return {name: value for name, value in options.items() if name not in aside}


def differences(stored: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the two cannot be compared. Raises ValueError if `stored` is not a baseline."""
    if stored.get("format") != FORMAT:
        raise ValueError(
            f"expected a baseline of format {FORMAT}, got {stored.get('format')!r}; store a new one with --save"
        )
    made, now = _without_asides(stored["made"]), like_of(document)
    found = [
        f"{name} was {made.get(name)!r} and is {now.get(name)!r}"
        for name in (*now, *(name for name in made if name not in now))
        if made.get(name) != now.get(name)
    ]
    for name in ("cores", "processor"):
        was, is_ = stored["machine"].get(name), document["machine"].get(name)
        if was != is_:
            found.append(f"{name} was {was!r} and is {is_!r}")
    for name in PULSES.values():
        if not (stored["machine"].get(name) and document["machine"].get(name)):
            found.append(f"{name} was not measured")
    return found


def compare(stored: Mapping[str, Any], document: Mapping[str, Any], tolerance: Tolerance) -> Comparison:
    """Compare each figure with the stored one. Raises KeyError if one is missing."""
    lines = [_rate(name, stored["figures"][name], document["total"][name], tolerance) for name in FIGURES]
    notes = []
    paces = {}
    for name, pulse in PULSES.items():
        ratio = float(document["machine"][pulse]) / float(stored["machine"][pulse])
        paces[name] = min(max(ratio, 1.0), PACE_MAX)
        if paces[name] != ratio:
            notes.append(f"{pulse} is {ratio:.2f} times the baseline's, and is limited to {paces[name]:g} times")
    now = {(each["endpoint"], each["operation"]): each for each in document["operations"]}
    for each in stored["operations"]:
        lines += _operation(each, now.get((each["endpoint"], each["operation"])), paces, tolerance)
    return Comparison(lines, notes)


def _operation(
    stored: Mapping[str, Any], now: Mapping[str, Any] | None, paces: Mapping[str, float], tolerance: Tolerance
) -> list[FigureChange]:
    """Compare one operation. An operation that is missing counts as a rate of 0."""
    name = f"{stored['endpoint']} {stored['operation']}"
    lines = [_rate(f"{name} per_s", stored["per_s"], now["per_s"] if now else 0.0, tolerance)]
    if now is not None:
        lines += [_latency(f"{name} {each}", stored[each], paces[each], now[each], tolerance) for each in PULSES]
    if stored["count"] < COUNT_MIN:
        return [_unjudged(line) for line in lines]
    if now is not None and now["count"] < COUNT_MIN:
        return [lines[0], *map(_unjudged, lines[1:])]
    return lines


def _unjudged(line: FigureChange) -> FigureChange:
    return line._replace(is_fallen=False, is_judged=False)


def _rate(name: str, stored: float, now: float, tolerance: Tolerance) -> FigureChange:
    limit = stored * (1 - tolerance.rate)
    return FigureChange(name, stored, 1.0, now, round(limit, 4), now < limit)


def _latency(name: str, stored: float, pace: float, now: float, tolerance: Tolerance) -> FigureChange:
    wanted = stored * pace
    noise_ms = tolerance.median_ms if name.endswith("p50_ms") else tolerance.tail_ms
    limit = max(wanted * (1 + tolerance.latency), wanted + noise_ms)
    return FigureChange(name, stored, round(pace, 2), now, round(limit, 3), now > limit)
