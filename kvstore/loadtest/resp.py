"""Connections to a Redis endpoint, of a node or of Redis itself, and the operations of a load through one.

This is the asyncio side. generator/resp_wire.py is the blocking side, which gevent needs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import hiredis

from kvstore.env.dns.names import NAMES
from kvstore.env.transport import split_address
from kvstore.errors import (
    InvalidRequest,
    NotAuthenticated,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    Refused,
    StoreError,
    Unavailable,
)
from kvstore.loadtest.loads import Call, LoadSpec, value_of
from kvstore.rpc.login import login_of_environment

_ERRORS: dict[str, type[StoreError]] = {
    "NOAUTH": NotAuthenticated,
    "WRONGPASS": NotAuthenticated,
    "NOPERM": PermissionDenied,
    "UNKNOWN": OutcomeUnknown,
    "TRYAGAIN": Overloaded,
    "CLUSTERDOWN": Unavailable,
    "NOREPLICAS": Unavailable,
    "QUOTA": Refused,
}


class ReplyError(Exception):
    """An error reply of the server."""


class Lost(ConnectionError):
    """The connection broke, or no reply arrived in time. Commands that were sent may have been applied."""


def pack(*words: bytes) -> bytes:
    """Return one command as bytes on the wire."""
    return bytes(hiredis.pack_command(words))  # type: ignore[arg-type]  # the stub allows only one word


class AsyncRespConnection(asyncio.Protocol):
    """One connection to a Redis endpoint. Commands of one event-loop turn are sent together. Replies arrive in the
    order of the commands."""

    def __init__(self, error_of: Callable[[str], Exception] = ReplyError) -> None:
        """`error_of` makes the exception for an error reply, also for one inside an array."""
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=error_of)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._written: list[bytes] = []
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self, *words: bytes) -> asyncio.Future[Any]:
        """Send one command. The future resolves to its reply, or to the reply's error or Lost."""
        answer = self._loop.create_future()
        if self._transport.is_closing():
            answer.set_exception(Lost("the connection is closed"))
            return answer
        if not self._written:
            self._loop.call_soon(self._flush)
        self._written.append(hiredis.pack_command(words))  # type: ignore[arg-type]  # as above
        self._waiting.append(answer)
        return answer

    async def ask(self, *words: bytes, timeout_s: float) -> Any:
        """Return the reply, or raise its error. Closes the connection and raises Lost after `timeout_s`."""
        answer = self.call(*words)
        timer = self._loop.call_later(timeout_s, self.close)
        try:
            return await answer
        finally:
            timer.cancel()

    async def ask_all(self, commands: Iterable[Sequence[bytes]], *, timeout_s: float) -> list[Any]:
        """Return the replies to commands that are sent together, including error replies. Raises Lost."""
        answers = [self.call(*words) for words in commands]
        timer = self._loop.call_later(timeout_s, self.close)
        try:
            replies = await asyncio.gather(*answers, return_exceptions=True)
        finally:
            timer.cancel()
        for reply in replies:
            if isinstance(reply, Lost):
                raise reply
        return replies

    def _flush(self) -> None:
        self._transport.write(b"".join(self._written))
        self._written.clear()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            answer = self._waiting.popleft()
            if answer.done():
                continue  # its caller was cancelled
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        for each in self._waiting:
            if not each.done():
                each.set_exception(Lost(f"the connection was lost: {error or 'closed'}"))

    @property
    def is_lost(self) -> bool:
        return bool(self._transport.is_closing())

    def close(self) -> None:
        self._transport.abort()


async def connect(
    address: str,
    *,
    timeout_s: float,
    error_of: Callable[[str], Exception] = ReplyError,
    tls: ssl.SSLContext | None = None,
) -> AsyncRespConnection:
    """Connect to `host:port`. Raises OSError, TimeoutError."""
    host, port = split_address(address)
    async with asyncio.timeout(timeout_s):
        place, *_ = await NAMES.find_soon(host)
        _, made = await asyncio.get_running_loop().create_connection(
            partial(AsyncRespConnection, error_of), place, port, ssl=tls, server_hostname=host if tls else None
        )
    return made


class RespCallers:
    """A pool of connections, one per concurrent call. Lost connections are replaced."""

    def __init__(self, address: str, load: LoadSpec, timeout_s: float) -> None:
        """Raises InvalidRequest."""
        host, _, port = address.rpartition(":")
        if "@" in address:
            raise InvalidRequest(
                "--resp: expected host:port without user or password; set KVSTORE_USER and KVSTORE_PASSWORD_FILE"
            )
        if not host or not port.isdecimal():
            raise InvalidRequest(f"--resp: expected host:port, got {address!r}")
        self._address, self._timeout_s = address, timeout_s
        self._value = value_of(load)
        self._free: list[AsyncRespConnection] = []

    async def open(self, connections: int) -> None:
        """Open the connections. Raises Unavailable, NotAuthenticated."""
        for _ in range(connections):
            self._free.append(await self._connect())
        await self._ask(b"PING")

    def calls(self) -> dict[str, Call]:
        async def get(key: bytes) -> None:
            await self._ask(b"GET", key)

        async def put(key: bytes) -> None:
            await self._ask(b"SET", key, self._value)

        async def increment(key: bytes) -> None:
            await self._ask(b"INCR", b"n-" + key)

        async def delete(key: bytes) -> None:
            await self._ask(b"DEL", key)

        return {"get": get, "put": put, "increment": increment, "delete": delete}

    def close(self) -> None:
        for each in self._free:
            each.close()

    async def _ask(self, *words: bytes) -> None:
        connection = await self._take()
        try:
            await connection.ask(*words, timeout_s=self._timeout_s)
        except Lost as error:
            raise OutcomeUnknown(str(error)) from None
        finally:
            self._free.append(connection)  # also after an error; `_take` drops lost connections

    async def _take(self) -> AsyncRespConnection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_lost:
                return connection
        return await self._connect()

    async def _connect(self) -> AsyncRespConnection:
        try:
            made = await connect(self._address, timeout_s=self._timeout_s, error_of=_error_of)
            if (login := login_of_environment()) is not None:
                await made.ask(b"AUTH", login.user.encode(), login.password, timeout_s=self._timeout_s)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{self._address} cannot be reached: {error or 'no reply'}") from None
        return made


def _error_of(reply: str) -> StoreError:
    """Return the error for an error reply."""
    kind = _ERRORS.get(reply.partition(" ")[0], InvalidRequest)
    return kind(reply)
