"""Finds out from the nodes' logs where the time of a change of leader goes. A busy machine stretches the figures but
hides none of them, because each phase is there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_LINE = re.compile(r"(\S+ \S+,\d+) INFO \S+ partition=(\S+) (.*)")
_FORMAT = "%Y-%m-%d %H:%M:%S,%f"
HAND_OVER, TAKEOVER = "hand-over", "takeover"
_BEGINS = {HAND_OVER: re.compile(r"\S+ is ready to lead"), TAKEOVER: re.compile(r"FOLLOWING -> CANDIDATE")}
_PHASES = {
    "released": re.compile(r"SERVING -> YIELDING"),
    "claiming": re.compile(r"-> CLAIMING"),
    "claimed": re.compile(r"CLAIMING -> OPENING"),
    "opened": re.compile(r"epoch=\d+ opened ledger"),
    "serving": re.compile(r"OPENING -> SERVING"),
}
SPAN_S_MAX = 30.0


class Event(NamedTuple):
    at: float
    partition: str
    what: str


class Span(NamedTuple):
    """One change of leader: milliseconds from its beginning to the end of each phase."""

    kind: str
    partition: str
    at: float
    phases: dict[str, int]


def read_logs(folder: Path) -> list[Event]:
    """Return the partitions' events in the nodes' logs, in order of time."""
    lines = (line for path in sorted(folder.glob("*.log*")) for line in path.read_text(errors="replace").splitlines())
    return sorted(_events(lines))


def _events(lines: Iterable[str]) -> Iterable[Event]:
    for line in lines:
        found = _LINE.match(line)
        if found is not None:
            yield Event(datetime.strptime(found[1], _FORMAT).astimezone().timestamp(), found[2], found[3])


def spans(events: list[Event]) -> list[Span]:
    """Return the changes of leader that were completed. A change during which another one begins counts as part of
    that one."""
    found: list[Span] = []
    for place, event in enumerate(events):
        kind = next((kind for kind, begins in _BEGINS.items() if begins.search(event.what)), None)
        before = next((span for span in reversed(found) if span.partition == event.partition), None)
        if kind is None or (before is not None and event.at < before.at + before.phases["serving"] / 1000):
            continue
        phases = _phases(event, events[place + 1 :])
        if "serving" in phases:
            found.append(Span(kind, event.partition, event.at, phases))
    return found


def _phases(begin: Event, later: Iterable[Event]) -> dict[str, int]:
    phases: dict[str, int] = {}
    for event in later:
        if event.at > begin.at + SPAN_S_MAX:
            break
        if event.partition != begin.partition:
            continue
        for name, pattern in _PHASES.items():
            if pattern.search(event.what):
                phases.setdefault(name, round((event.at - begin.at) * 1000))
        if "serving" in phases:
            break
    return phases


def summary(found: list[Span], kind: str) -> list[dict[str, Any]]:
    """Return a row for each phase: median and maximum, in milliseconds since the beginning."""
    rows = []
    for name in _PHASES:
        times = [span.phases[name] for span in found if span.kind == kind and name in span.phases]
        if times:
            row = {"change": kind, "until": name, "count": len(times)}
            rows.append(row | {"median_ms": round(median(times)), "longest_ms": max(times)})
    return rows
