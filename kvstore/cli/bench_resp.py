"""The operations of `kvstore bench run --resp`: plain commands to one Redis door, of a node or of Redis itself."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random
from typing import Any

import hiredis

from kvstore.cli.loads import Call, Load
from kvstore.env.dns.names import NAMES
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


class Connection(asyncio.Protocol):
    """One command at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader()
        self._transport: Any = None
        self._answer: asyncio.Future[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        reply = self._reader.gets()
        if reply is not False:
            self._settle(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._settle(OutcomeUnknown(f"the connection was lost: {error or 'closed by the server'}"))

    async def ask(self, packed: bytes) -> None:
        """Raises StoreError."""
        loop = asyncio.get_running_loop()
        answer = self._answer = loop.create_future()
        timer = loop.call_later(self._timeout_s, self.close)
        self._transport.write(packed)
        reply = await answer
        timer.cancel()
        if isinstance(reply, Exception):
            raise reply if isinstance(reply, OutcomeUnknown) else _error_of(str(reply))

    @property
    def is_lost(self) -> bool:
        return bool(self._transport.is_closing())

    def close(self) -> None:
        self._transport.abort()

    def _settle(self, reply: Any) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(reply)


class RespCallers:
    """Each call takes a connection that is free; one that is lost is replaced."""

    def __init__(self, address: str, load: Load, timeout_s: float) -> None:
        """Raises InvalidRequest."""
        host, _, port = address.rpartition(":")
        if "@" in address:
            raise InvalidRequest(
                "--resp: want no user or password here: KVSTORE_USER and KVSTORE_PASSWORD_FILE name them"
            )
        if not host or not port.isdecimal():
            raise InvalidRequest(f"--resp: want host:port, got {address!r}")
        self._host, self._port, self._timeout_s = host, int(port), timeout_s
        self._value = Random(load.seed).randbytes(load.value_bytes)
        self._free: list[Connection] = []

    async def open(self, connections: int) -> None:
        """Raises Unavailable, NotAuthenticated."""
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
            await connection.ask(hiredis.pack_command(words))  # type: ignore[arg-type]  # the stub wants exactly one word
        finally:
            self._free.append(connection)  # also after an error; one that was lost is left out when it is its turn

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.is_lost:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                place, *_ = await NAMES.find_soon(self._host)
                _, made = await loop.create_connection(partial(Connection, self._timeout_s), place, self._port)
        except (OSError, TimeoutError) as error:
            raise Unavailable(f"{self._host}:{self._port} cannot be reached: {error or 'no answer'}") from None
        login = login_of_environment()
        if login is not None:
            words = (b"AUTH", login.user.encode(), login.password)
            await made.ask(hiredis.pack_command(words))  # type: ignore[arg-type]  # as above
        return made


def _error_of(reply: str) -> StoreError:
    """The error that a reply says."""
    kind = _ERRORS.get(reply.partition(" ")[0], InvalidRequest)
    return kind(reply)
