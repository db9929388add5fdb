"""tests/loops.py: misuse of a loop fails the test that does it, in every kind of test."""

import asyncio
import socket
from collections.abc import Callable

import pytest


async def coroutine() -> None:
    pass


@pytest.mark.parametrize("use", [lambda loop: loop.call_soon(print), lambda loop: loop.call_later(1, print)])
async def test_another_thread_may_not_call_loop_methods(use: Callable[[asyncio.AbstractEventLoop], None]) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(RuntimeError, match="Non-thread-safe operation"):
        await asyncio.to_thread(use, loop)


@pytest.mark.parametrize(
    "use",
    [
        lambda loop: loop.call_soon(coroutine),
        lambda loop: loop.call_later(1, coroutine),
        lambda loop: loop.call_soon_threadsafe(coroutine),
        lambda loop: loop.run_in_executor(None, coroutine),
    ],
)
async def test_coroutine_is_not_a_callback(use: Callable[[asyncio.AbstractEventLoop], None]) -> None:
    with pytest.raises(TypeError, match="coroutines cannot be used with"):
        use(asyncio.get_running_loop())


async def test_sockets_do_not_block() -> None:
    loop = asyncio.get_running_loop()
    one, other = socket.socketpair()
    with one, other:
        other.send(b"there is something to read")
        with pytest.raises(ValueError, match="must be non-blocking"):
            await loop.sock_sendall(one, b"x")
        with pytest.raises(ValueError, match="must be non-blocking"):
            await loop.sock_recv(one, 1)


class Handler(asyncio.Protocol):
    """A handler of a stream, as a part of this project is one."""

    __module__ = "kvstore.test"

    def __init__(self) -> None:
        self.stream: asyncio.Transport
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.stream = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


async def test_handler_may_not_write_after_its_connection_was_lost() -> None:
    one, other = socket.socketpair()
    with other:
        _, handler = await asyncio.get_running_loop().create_connection(Handler, sock=one)
        handler.stream.abort()
        handler.stream.write(b"dropped, because the handler does not know yet")
        await handler.lost.wait()
        for use in (lambda: handler.stream.write(b"x"), handler.stream.set_write_buffer_limits):
            with pytest.raises(RuntimeError, match="the handler is closed"):
                use()
