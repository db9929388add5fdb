"""The parent span of a call, in the format of W3C Trace Context:

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
    """A span of another process."""

    trace: int
    span: int
    is_sampled: bool


def parse(text: str) -> Parent | None:
    """Return the parent, or None if the text is malformed: the standard ignores it then, and the trace begins here."""
    found = _SHAPE.fullmatch(text)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    parent = Parent(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
    return parent if parent.trace and parent.span else None


def spell(trace: int, span: int) -> str:
    """Return the header for a sampled parent."""
    return f"00-{trace:032x}-{span:016x}-01"


def parent_of(headers: Iterable[tuple[str, Any]]) -> Parent | None:
    """Find the parent among a call's headers, whose names are in lower case."""
    found = [value for name, value in headers if name == HEADER]
    return parse(found[0]) if len(found) == 1 and isinstance(found[0], str) else None
