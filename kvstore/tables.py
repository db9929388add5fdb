"""Formats rows as a text table. Decides only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_ESCAPES = {9: "\\t", 10: "\\n", 13: "\\r", 92: "\\\\"}
_WIDE = 10_000
"""Width in columns. The terminal wraps longer lines, and a pipe gets them uncut."""


def as_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return the rows as text: columns padded to their widest value, headers in capitals, numbers aligned right."""
    names = list(columns) or list(rows[0] if rows else ())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        known = [value for row in rows if (value := row.get(name)) is not None]
        are_numbers = bool(known) and all(map(_is_number, known))
        table.add_column(Text(name.replace("_", " ").upper()), justify="right" if are_numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in names))
    paper = StringIO()
    Console(file=paper, width=_WIDE, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in paper.getvalue().splitlines())


def printable(data: bytes) -> str:
    """Return stored bytes as one line that cannot affect a terminal. Bytes that are not UTF-8, unprintable characters
    and backslashes are escaped as in Python."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(each if each.isprintable() and each != "\\" else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code in _ESCAPES:
        return _ESCAPES[code]
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}"
        case bytes():
            return printable(value)
        case list() | tuple():
            return ",".join(_cell(each) for each in value)
        case _:
            return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
