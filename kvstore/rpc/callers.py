"""Records the address of the client that made the current gRPC call. The address is the client's own even if the
connection passes through a front that forwards it (kvstore/rpc/front.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

from kvstore.env.networks import address_of

_caller: ContextVar[str | None] = ContextVar("caller", default=None)


def note_caller(context: Any, carried: Mapping[str, str]) -> None:
    """Record which client makes the current call. Call this at the beginning of each call. `carried` maps the
    addresses of a front's connections to the addresses of the clients behind them."""
    peer = unquote(context.peer())
    _caller.set(carried.get(peer, peer))


def caller_of(context: Any = None) -> str:
    """Return the address of the client in gRPC's form, for example `ipv4:10.0.0.9:51112` or `ipv6:[::1]:51112`. If
    the call was not recorded, return the peer address of `context`, or `?` without a context."""
    return _caller.get() or ("?" if context is None else unquote(context.peer()))


def owner_of(user: str, context: Any) -> str:
    """Return whose share of a limit the current call uses: that of its user, or that of the client's network if the
    user is empty because access control is off."""
    return user or address_of(caller_of(context))
