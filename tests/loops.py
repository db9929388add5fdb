"""The checks of asyncio's debug mode without its records of where each task, future and callback was made, which took
half of the unit tests' processor time. So the checks apply to every test, also with real clusters and in the
simulation.

Nodes run on uvloop, whose streams raise an error for a write after their end. Those of asyncio drop the bytes, so here
they raise the error too, for handlers of this project."""

from __future__ import annotations

import asyncio
import socket
from asyncio import selector_events
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable
from functools import wraps
from typing import Any


def refuse_misuse() -> None:
    """Have loops of asyncio raise RuntimeError where another thread calls what is not for it, TypeError where a
    coroutine is to be called as a plain function, and ValueError where a socket would block. Holds in this process from
    now on."""
    _check("call_soon", lambda loop, callback, *_: (loop._check_thread(), loop._check_callback(callback, "call_soon")))
    _check("call_at", lambda loop, _, callback, *__: (loop._check_thread(), loop._check_callback(callback, "call_at")))
    _check("call_soon_threadsafe", lambda loop, callback, *_: loop._check_callback(callback, "call_soon_threadsafe"))
    _check("run_in_executor", lambda loop, _, callback, *__: loop._check_callback(callback, "run_in_executor"))
    for name in ("sock_accept", "sock_connect", "sock_recv", "sock_recv_into", "sock_sendall"):
        _check(name, _does_not_block)
    _refuse_writes_to_closed_streams()


def _refuse_writes_to_closed_streams() -> None:
    streams: Any = selector_events._SelectorSocketTransport  # type: ignore[attr-defined]
    end: Callable[..., object] = streams._call_connection_lost

    @wraps(end)
    def ended(stream: Any, error: Exception | None) -> object:
        is_ours = type(stream.get_protocol()).__module__.startswith("kvstore.")
        try:
            return end(stream, error)
        finally:
            stream.is_closed_for_us = is_ours

    streams._call_connection_lost = ended
    for name in ("write", "writelines", "write_eof", "set_write_buffer_limits"):
        setattr(streams, name, _while_open(getattr(streams, name)))


def _while_open(method: Callable[..., object]) -> Callable[..., object]:
    @wraps(method)
    def checked(stream: Any, *arguments: object, **options: object) -> object:
        if getattr(stream, "is_closed_for_us", False):
            raise RuntimeError(f"unable to perform operation on {stream!r}; the handler is closed")
        return method(stream, *arguments, **options)

    return checked


def _does_not_block(_: object, sock: socket.socket, *__: object) -> None:
    if sock.gettimeout() != 0:
        raise ValueError("the socket must be non-blocking")


def _check(name: str, check: Callable[..., object]) -> None:
    """Have a method of loops first check its arguments."""
    method: Callable[..., Any] = getattr(BaseSelectorEventLoop, name)

    @wraps(method)
    def checked(loop: asyncio.BaseEventLoop, *arguments: Any, **options: Any) -> Any:
        if not loop.is_closed():  # which the method itself refuses
            check(loop, *arguments)
        return method(loop, *arguments, **options)

    setattr(BaseSelectorEventLoop, name, checked)
