"""Markdown that the generated pages of the reference share. Decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def one_line(text: str) -> str:
    """Return text as it may be in a cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown without line breaks."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines]) + "\n"
