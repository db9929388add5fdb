"""The operations of workloads, and the goals of a run. Decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

READ, UPDATE, INSERT, SCAN, MODIFY, CAS = "read", "update", "insert", "scan", "read-modify-write", "compare-and-set"
OPERATIONS = (READ, UPDATE, INSERT, SCAN, MODIFY, CAS)
COUNT_MIN = 100
"""Of fewer operations the 99th percentile is the slowest one."""
ALL = ""
_NAME = re.compile(r"[^\W\d]\w*")
"""Of an operation: a method, where the user is one's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A wrong value fails any run."""

    achieved_min: float = 0.0
    """Operations begun before the end and done, of those due after the warm-up; 0: whatever."""
    errors_max: float = 0.01
    """Of all operations that ended."""
    p99_ms: Mapping[str, float] = field(default_factory=dict)
    """By operation, at each door; that of ALL for those that are not named. None: whatever."""


def p99_goals(text: str) -> dict[str, float]:
    """`50`, `read=20,update=50`, or both: `read=20,50`. Whether there is such an operation `unknown` tells. Raises
    ValueError."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.rpartition("=")
        try:
            goal = float(number)
        except ValueError:
            goal = 0.0
        if not 0 < goal < inf or (equals and name not in OPERATIONS and not _NAME.fullmatch(name)) or name in found:
            raise ValueError(
                f"want milliseconds, or OPERATION=milliseconds once for some of {', '.join(OPERATIONS)}, got {part!r}"
            )
        found[name] = goal
    return found


def unknown(goals: Mapping[str, float], own: Iterable[str]) -> str:
    """Return the fault in the names of goals, given the operations of custom users; empty if there is none."""
    known = (*OPERATIONS, *own)
    wrong = [name for name in goals if name not in (ALL, *known)]
    return f"--p99-ms: want operations of {', '.join(known)}, got {', '.join(wrong)}" if wrong else ""


def slow(operations: Iterable[Mapping[str, Any]], goals: Goals) -> list[str]:
    """The operations that are slower than they must be, as sentences."""
    found = []
    for each in operations:
        goal = goals.p99_ms.get(each["operation"], goals.p99_ms.get(ALL, inf))
        if each["count"] >= COUNT_MIN and each["p99_ms"] > goal:
            found.append(f"{each['door']} {each['operation']}: p99 is {each['p99_ms']:g} ms; the goal is {goal:g} ms")
    return found
