"""Tables and facts, as the templates show them. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode


class Cell(NamedTuple):
    """A cell of a table. `tone`: its CSS class; `warn` and `bad` are only for what a finding names, so that the verdict
    and the tables agree. `part`: a progress from 0 to 1. `live`: the name under which it is updated. `link`: another
    page about its subject."""

    text: str
    tone: str = ""
    part: float | None = None
    live: str = ""
    link: str = ""


class Fact(NamedTuple):
    """A named value at the top of a page."""

    name: str
    text: str
    tone: str = ""
    link: str = ""


def table(name: str, title: str, columns: Sequence[str], rows: Iterable[list[Cell]], note: str = "") -> dict[str, Any]:
    """Return a table for the template."""
    return {"id": name, "title": title, "columns": columns, "rows": list(rows), "note": note}


def page_path(page: str, **parameters: str) -> str:
    """Return the path of a page of the dashboard, with its parameters encoded."""
    query = urlencode({name: value for name, value in parameters.items() if value})
    return f"/ui/{page}{'?' if query else ''}{query}"
