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
"""With fewer operations, the 99th percentile is simply the slowest one."""
ALL = ""
_NAME = re.compile(r"[^\W\d]\w*")
"""The name of an operation; for a custom user, the name of a method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The goals of a run. A wrong value fails any run."""

    achieved_min: float = 0.0
    """Minimum share of the operations due after the warm-up that must be done before the end; 0 means no minimum."""
    errors_max: float = 0.01
    """Maximum share of failed operations among all that ended."""
    p99_ms: Mapping[str, float] = field(default_factory=dict)
    """Maximum p99 by operation, at each endpoint. ALL applies to operations without their own goal."""


def p99_goals(text: str) -> dict[str, float]:
    """Parse goals such as `50`, `read=20,update=50` or `read=20,50`. Raises ValueError. `unknown` checks the names of
    operations."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, number = part.rpartition("=")
        try:
            goal = float(number)
        except ValueError:
            goal = 0.0
        if not 0 < goal < inf or (equals and name not in OPERATIONS and not _NAME.fullmatch(name)) or name in found:
            raise ValueError(
                f"expected milliseconds, or OPERATION=milliseconds once per operation of {', '.join(OPERATIONS)}, "
                f"got {part!r}"
            )
        found[name] = goal
    return found


def unknown(goals: Mapping[str, float], own: Iterable[str]) -> str:
    """Return an error if a goal names an unknown operation, given the operations of custom users; otherwise ""."""
    known = (*OPERATIONS, *own)
    wrong = [name for name in goals if name not in (ALL, *known)]
    return f"--p99-ms: expected operations of {', '.join(known)}, got {', '.join(wrong)}" if wrong else ""


def slow(operations: Iterable[Mapping[str, Any]], goals: Goals) -> list[str]:
    """Return a sentence for each operation that misses its goal."""
    found = []
    for each in operations:
        goal = goals.p99_ms.get(each["operation"], goals.p99_ms.get(ALL, inf))
        if each["count"] >= COUNT_MIN and each["p99_ms"] > goal:
            found.append(
                f"{each['endpoint']} {each['operation']}: p99 is {each['p99_ms']:g} ms; the goal is {goal:g} ms"
            )
    return found
