"""Requests to the HTTP port that did not come over a connection."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from kvstore.rpc.http.messages import Headers, HttpRequest, RequestBody


def request_of(method: str, target: str, headers: Mapping[str, str] | None = None) -> HttpRequest:
    """Return a request without a body and without a certificate, from this machine."""
    lines = {name.lower(): [value] for name, value in (headers or {}).items()}
    connection: Any = SimpleNamespace(peer="127.0.0.1", certificate=None)
    return HttpRequest(method, target, Headers(lines), RequestBody(0, lambda: None), connection, "1.1")
