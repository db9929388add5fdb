"""The faults of a chaos run and their times, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

KILL, START, ADD_PARTITION, SNAPSHOT = "kill -9", "start", "add a partition", "take a snapshot"
FIRST_S = 4.0
"""Seconds of undisturbed measuring before the first fault."""
CALM_S = 8.0
"""Seconds without a new fault before the end, so that recovery from the last fault is seen."""
DOWN_S = 4.0
PERIOD_S = 45.0
"""Seconds between kills. A restarted node takes a while to get its leaderships back."""


class ChaosFault(NamedTuple):
    """A fault that happens at `at_s` seconds after the start, to `node` if it needs one."""

    at_s: float
    what: str
    node: str = ""


def plan(nodes: Sequence[str], seconds: float, warmup_s: float, seed: int) -> list[ChaosFault]:
    """Plan kills of one node after the other, each restarted before the next. If there is time, add a partition in the
    middle and take a snapshot after another kill. Raises ValueError if the run is too short for one kill."""
    first, last = warmup_s + FIRST_S, seconds - CALM_S - DOWN_S
    if last < first or not nodes:
        least = warmup_s + FIRST_S + DOWN_S + CALM_S
        raise ValueError(f"chaos: expected at least {least:g} s and one node, got {seconds:g} s and {len(nodes)} nodes")
    order = sorted(nodes)
    Random(seed).shuffle(order)
    faults: list[ChaosFault] = []
    at, number = first, 0
    while at <= last:
        node = order[number % len(order)]
        faults += [ChaosFault(at, KILL, node), ChaosFault(at + DOWN_S, START, node)]
        at, number = at + PERIOD_S, number + 1
    partition_at = _between(0.4 * seconds, first)
    snapshot_at = max(_between(0.65 * seconds, first), partition_at + PERIOD_S)
    if snapshot_at <= seconds - CALM_S:
        faults += [ChaosFault(partition_at, ADD_PARTITION), ChaosFault(snapshot_at, SNAPSHOT)]
    return sorted(faults)


def _between(wished_s: float, first_s: float) -> float:
    """Return a time near the wished one, half-way between two kills, so that kills and changes rarely overlap."""
    round_number = max(0, round((wished_s - first_s) / PERIOD_S - 0.5))
    return first_s + (round_number + 0.5) * PERIOD_S
