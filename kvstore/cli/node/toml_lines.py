"""Where in a TOML file each name is set, which `tomllib` does not tell. Decides only.

A statement ends with a line, unless it is in a multi-line string or a list: so lines are gathered until they parse by
themselves.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

STATEMENT_LINES_MAX = 1_000
"""What is longer has no line of its own: each line more is parsed with all before it."""


def lines_of(text: str) -> dict[str, int]:
    """The line, from 1, on which each dotted name stands first: settings, tables, and the tables around them. `text` is
    TOML."""
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
    """The line of a setting, or of one of its list, or else of the table that it would stand in; None: of neither."""
    name = name.partition("[")[0]
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition(".")[0]
    return None


def _names(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Yield the dotted name of everything in a table, outer ones first."""
    for name, value in table.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):  # [[…]]
            yield from _names(value[0], f"{prefix}{name}.")
