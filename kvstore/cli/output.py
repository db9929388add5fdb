"""Formats rows as a table for people or JSON for programs. Decides only: returns text, prints nothing."""

from __future__ import annotations

import json
from typing import Any

from kvstore.tables import as_table, printable

__all__ = ["as_json", "as_table", "printable", "shown_prefix"]


def shown_prefix(prefix: bytes) -> str:
    """Return a prefix of keys as a command accepts it: unprintable bytes as \\xNN, backslashes doubled."""
    text = prefix.decode("utf-8", "surrogateescape")
    return "".join(
        ("\\\\" if each == "\\" else each)
        if each.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in each.encode("utf-8", "surrogateescape"))
        for each in text
    )


def as_json(value: Any) -> str:
    """Return one indented JSON document. Keys keep their order; bytes are UTF-8 with other bytes escaped."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(value)
