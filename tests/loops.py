"""The checks of asyncio's debug mode without its records of where each task, future and callback was made, which took
half of the unit tests' processor time. So the checks apply to every test, also with real clusters and in the
simulation."""

from __future__ import annotations

import asyncio
import socket
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
