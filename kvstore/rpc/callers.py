"""The address of the caller of the present gRPC call: its own, also where a front carries its connection."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

_caller: ContextVar[str | None] = ContextVar("caller", default=None)


def note_caller(context: Any, carried: Mapping[str, str]) -> None:
    """Find out who calls, at the beginning of a call. `carried`: the front's addresses of callers by its own."""
    peer = unquote(context.peer())
    _caller.set(carried.get(peer, peer))


def caller_of(context: Any = None) -> str:
    """Return the caller's address as gRPC names addresses, for example `ipv4:10.0.0.9:51112` or `ipv6:[::1]:51112`.
    `context`: the call's, for calls that were not noted."""
    return _caller.get() or ("?" if context is None else unquote(context.peer()))
