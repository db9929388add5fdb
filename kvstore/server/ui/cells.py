"""Tables and facts, as the templates show them. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode


class Cell(NamedTuple):
    """A cell of a table.

    `tone` is its CSS class: `n` for numbers, `wrap` for long names without spaces, and `good`, `warn` or `bad`. `warn`
    and `bad` are only for what a finding names, so that the verdict and the tables agree. `part` is a progress from 0
    to 1. `live` is the name under which the cell is updated. `link` is another page about its subject. With `is_prose`,
    text between backticks is code, which it is not in names that others choose.
    """

    text: str
    tone: str = ""
    part: float | None = None
    live: str = ""
    link: str = ""
    is_prose: bool = False


class Fact(NamedTuple):
    """A named value at the top of a page."""

    name: str
    text: str
    tone: str = ""
    link: str = ""
    is_prose: bool = False


def table(name: str, title: str, columns: Sequence[str], rows: Iterable[list[Cell]], note: str = "") -> dict[str, Any]:
    """Return a table for the template."""
    return {"id": name, "title": title, "columns": columns, "rows": list(rows), "note": note}


def page_path(page: str, **parameters: bytes | str) -> str:
    """Return the path of a page of the dashboard, with its parameters encoded. Bytes are percent-encoded as they
    are."""
    query = urlencode({name: each for name, each in parameters.items() if each}, safe="", quote_via=quote)
    return f"/ui/{page}{'?' if query else ''}{query}"
