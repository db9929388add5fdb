"""The templates and files of the dashboard, which are read once, and their HTTP responses. A template is compiled when
it is first used, because a node's start is not to wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2

from kvstore.rpc.http.messages import HttpResponse
from kvstore.server.ui.words import parts

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEMPLATES = ("base.html", "page.html", "detail.html", "keys.html", "node.html", "parts.html")
FILES = {
    "ui.css": "ui.css",
    "ui.js": "ui.js",
    "tables.js": "tables.js",
    "uplot.css": "uplot/uplot.css",
    "uplot.js": "uplot/uplot.js",
}
"""The files that pages load, and where they are."""
DETAILS = ("ledgers", "partition", "bookie", "clients", "transactions", "snapshots", "slow", "users")
"""The pages of kvstore.server.ui.details, below /ui/."""
KEYS = ("keys", "key", "sessions")
"""The pages of kvstore.server.ui.key_pages, below /ui/."""
MENU = (
    ("/ui", "Cluster"),
    ("/ui/keys", "Keys"),
    ("/ui/sessions", "Sessions and locks"),
    ("/ui/clients", "Clients"),
    ("/ui/transactions", "Transactions"),
    ("/ui/snapshots", "Snapshots"),
    ("/ui/slow", "Slow log"),
    ("/ui/users", "Users and audit log"),
)
"""The pages that every page links to if its viewer may open them, with their labels."""


class Pages:
    """The pages of one node."""

    def __init__(self) -> None:
        folder = resources.files(__package__) / "files"
        self._files = {name: (folder / path).read_text("utf-8") for name, path in FILES.items()}
        self._templates = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            loader=jinja2.DictLoader({name: (folder / name).read_text("utf-8") for name in TEMPLATES}),
            trim_blocks=True,
        )
        self._templates.filters["parts"] = parts

    def html(self, name: str, context: Mapping[str, Any], *, status: int = 200) -> HttpResponse:
        """Return the page that a template makes of `context`."""
        text = self._templates.get_template(name).render({"page": "", "server": "", "menu": MENU, **context})
        return HttpResponse(status, text.encode(), HEADERS, "text/html; charset=utf-8")

    def file(self, name: str) -> HttpResponse:
        """Return one of FILES."""
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return HttpResponse(200, self._files[name].encode(), HEADERS, f"{kind}; charset=utf-8")
