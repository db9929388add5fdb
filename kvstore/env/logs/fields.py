"""Fields of log messages: `name=%s` in a message is a field with that name. Decides only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_CONVERSION = re.compile(r"(?:\b([a-z]\w*)=)?%(?:(%)|[#0\- +]*\d*(?:\.\d+)?([a-zA-Z]))")
RESERVED = frozenset(("time", "level", "logger", "event", "exception", "process"))
"""Names that a line itself uses. A field with such a name gets an underscore."""


@lru_cache(maxsize=1_024)
def field_names(template: str) -> tuple[tuple[str, str], ...]:
    """Return name and conversion of each argument of a message; the name is empty if it is not a field."""
    found = []
    for name, escaped, kind in _CONVERSION.findall(template):
        if not escaped:
            found.append((f"{name}_" if name in RESERVED else name, kind))
    return tuple(found)


def fields_of(template: object, arguments: object) -> dict[str, Any]:
    """Return the fields of a message. Numbers stay numbers, everything else is text. A message that does not fit its
    arguments has no fields."""
    if not isinstance(template, str) or not isinstance(arguments, tuple):
        return {}
    names = field_names(template)
    if len(names) != len(arguments):
        return {}
    return {name: _value(kind, argument) for (name, kind), argument in zip(names, arguments, strict=True) if name}


def _value(kind: str, argument: Any) -> Any:
    if kind == "x":
        return f"{argument:x}" if isinstance(argument, int) else str(argument)
    if isinstance(argument, bool | float) or (isinstance(argument, int) and -(1 << 63) <= argument < 1 << 63):
        return argument if kind != "f" or not isinstance(argument, float) else round(argument, 6)
    return repr(argument) if kind == "r" else str(argument)


def on_one_line(text: str) -> str:
    """Escape characters that would begin another line or control a terminal: part of a message may come from an
    unauthenticated peer."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def as_plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that any JSON writer accepts."""
    return {
        name: value if value is None or isinstance(value, bool | int | float | str) else str(value)
        for name, value in fields.items()
    }
