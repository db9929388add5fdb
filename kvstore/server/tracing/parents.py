"""The parent that a call brings along, in the words of W3C Trace Context:

    traceparent := "00-" trace "-" span "-" flags      32, 16 and 2 lower-case hexadecimal digits; flags & 1: sampled

Decides only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

HEADER = "traceparent"
_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """Another process's span."""

    trace: int
    span: int
    is_sampled: bool


def parse(text: str) -> Parent | None:
    """Read a parent; None for what is none, which the standard has ignored: the trace begins here then."""
    found = _SHAPE.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    parent = Parent(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
    return parent if parent.trace and parent.span else None


def spell(trace: int, span: int) -> str:
    """Write a sampled parent."""
    return f"00-{trace:032x}-{span:016x}-01"


def parent_of(headers: Iterable[tuple[str, Any]]) -> Parent | None:
    """Find the parent among a call's headers, whose names are in lower case."""
    found = [value for name, value in headers if name == HEADER]
    return parse(found[0]) if len(found) == 1 and isinstance(found[0], str) else None
