"""Finds out from the nodes' logs when each range changed hands, and how long operations on it waited then. Decides
only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from loadtest.drills.ring_load import Span, Wait
from loadtest.drills.spans import Event

_MOVE = re.compile(r"move=(\d+) (.*)")
BEFORE_S, AFTER_S = 0.1, 0.5
"""Seconds added before and after the times in the logs: a freeze counts from its send, and servers learn routes
after the flip."""


class HandOver(NamedTuple):
    """Times of one move by the wall clock: its first freeze, its last freeze, its release, the start of the new
    ownership, and the announcement by the ring."""

    first_frozen: float
    frozen: float
    released: float
    owned: float
    flipped: float
    freezes: int


class Longest(NamedTuple):
    """The longest waits of operations on a range that changed hands, in seconds; None if there were no operations at
    that time."""

    write: float | None
    read: float | None


def hand_overs(events: Iterable[Event]) -> dict[int, HandOver]:
    """Return the hand-over of each move that reached its flip, by the number of the move."""
    seen: dict[int, dict[str, float]] = {}
    freezes: dict[int, int] = {}
    for event in events:
        found = _MOVE.match(event.what)
        if found is None:
            continue
        move, what = int(found[1]), found[2]
        times = seen.setdefault(move, {})
        if what.startswith("frozen at"):
            freezes[move] = freezes.get(move, 0) + 1
            times.setdefault("first", event.at)
            times["frozen"] = event.at
        for name, words in (("released", "released to"), ("owned", "owns the range"), ("flipped", "the ring is")):
            if what.startswith(words):
                times.setdefault(name, event.at)
    return {
        move: HandOver(
            times["first"], times["frozen"], times["released"], times["owned"], times["flipped"], freezes[move]
        )
        for move, times in seen.items()
        if len(times) == len(HandOver._fields) - 1
    }


def longest_waits(
    spans: Mapping[int, Span], found: Mapping[int, HandOver], waits: Sequence[Wait]
) -> dict[int, Longest]:
    """Return the longest waits in each move whose range is in `spans`."""
    return {move: _longest(spans[move], found[move], waits) for move in spans if move in found}


def _longest(span: Span, hand_over: HandOver, waits: Sequence[Wait]) -> Longest:
    since, until = hand_over.first_frozen - BEFORE_S, hand_over.flipped + AFTER_S
    met = [
        wait
        for wait in waits
        if wait.ended >= since and wait.ended - wait.seconds <= until and span[0] <= wait.token <= span[1]
    ]
    return Longest(
        max((wait.seconds for wait in met if wait.is_write), default=None),
        max((wait.seconds for wait in met if not wait.is_write), default=None),
    )


def hand_over_rows(found: Iterable[HandOver]) -> list[dict[str, Any]]:
    """Return a row for each part of the hand-overs, with its durations in milliseconds."""
    spans = list(found)
    parts = {
        "freeze to release": [each.released - each.frozen for each in spans],
        "release to own": [each.owned - each.released for each in spans],
        "own to flip": [each.flipped - each.owned for each in spans],
        "freeze to flip": [each.flipped - each.frozen for each in spans],
    }
    return [
        {
            "part": name,
            "count": len(times),
            "median_ms": round(1_000 * quantile(times, 0.5)),
            "longest_ms": round(1_000 * max(times)),
        }
        for name, times in parts.items()
        if times
    ]


def quantile(values: Iterable[float], part: float) -> float:
    """Return the smallest value that at least `part` of the values do not exceed; 0 if there are none."""
    order = sorted(values)
    return order[max(0, ceil(part * len(order)) - 1)] if order else 0.0
