"""Finds the line of each name in a TOML file, which `tomllib` does not report. Decides only.

A statement ends with a line, unless it is within a multi-line string or a list. So lines are gathered until they parse
on their own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

STATEMENT_LINES_MAX = 1_000
"""Longer statements get no line number, because each further line is parsed together with all lines before it."""


def lines_of(text: str) -> dict[str, int]:
    """Return the line, from 1, on which each dotted name first appears: settings, tables and enclosing tables. `text`
    must be TOML."""
    found: dict[str, int] = {}
    table = ""
    first, gathered = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        gathered += line + "\n"
        try:
            statement = tomllib.loads(gathered)
        except tomllib.TOMLDecodeError:
            if number - first >= STATEMENT_LINES_MAX:
                return found
            continue
        if gathered.lstrip().startswith("["):  # a header
            *_, name = _names(statement, "")
            found.setdefault(name, first)
            table = f"{name}."
        else:
            for name in _names(statement, table):
                found.setdefault(name, first)
        first, gathered = number + 1, ""
    return found


def line_of(name: str, lines: dict[str, int]) -> int | None:
    """Return the line of a setting, else of an enclosing table, or None."""
    name = name.partition("[")[0]
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition(".")[0]
    return None


def _names(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the dotted name of everything in a table, outer names first."""
    for name, value in table.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):  # [[…]]
            yield from _names(value[0], f"{prefix}{name}.")
