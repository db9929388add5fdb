"""Rows → a table for people or JSON for programs. Decides only: returns text, prints nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def as_json(value: Any) -> str:
    """One document, indented, keys in the order given; bytes as UTF-8 with what is not text escaped."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Columns padded to their widest value, headed by their names in capitals; numbers to the right."""
    names = list(columns) or list(rows[0] if rows else ())
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    heads = [name.replace("_", " ").upper() for name in names]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(names))]
    right = [bool(rows) and all(_is_number(row.get(name)) for row in rows) for name in names]
    return "\n".join(_line(line, widths, right) for line in [heads, *cells])


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if number else cell.ljust(width)
        for cell, width, number in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case list() | tuple():
            return ",".join(_cell(each) for each in value)
        case _:
            return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
