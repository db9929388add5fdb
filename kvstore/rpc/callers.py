"""Keeps the address of the client of the current gRPC call, also behind a front that forwards the client's
connection."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

_caller: ContextVar[str | None] = ContextVar("caller", default=None)


def note_caller(context: Any, carried: Mapping[str, str]) -> None:
    """Record the client of a call at its beginning. `carried` maps the front's addresses to those of its clients."""
    peer = unquote(context.peer())
    _caller.set(carried.get(peer, peer))


def caller_of(context: Any = None) -> str:
    """Return the client's address in gRPC's form, for example `ipv4:10.0.0.9:51112` or `ipv6:[::1]:51112`. `context` is
    for calls that were not recorded."""
    return _caller.get() or ("?" if context is None else unquote(context.peer()))
