"""Relays between a node's advertised address and the address at which it listens. A cut relay acts like a stale name
or a firewall: connections to the node fail, and connections that the node makes do not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from tests.beside import beside


class Relay:
    """Listens at `host:port` and forwards to 127.0.0.1:port. Its methods run in the loop of `Relays`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._relay, self._host, self._port)

    def hang_up(self) -> None:
        """Break all connections, and refuse others."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Accept connections but forward nothing, on existing connections either."""
        self._is_open.clear()

    async def pass_on(self) -> None:
        """Forward again. Connections that may have lost something are closed."""
        self.hang_up()
        self._is_open.set()
        await self.listen()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(OSError):
            await self._is_open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            self._writers.add(back)
            with suppress(OSError):
                await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
            back.transport.abort()
            self._writers.discard(back)
        writer.transport.abort()
        self._writers.discard(writer)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


class Relays:
    """All relays, in their own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._relays: dict[tuple[str, int], Relay] = {}

    def add(self, host: str, ports: Iterable[int]) -> None:
        for port in ports:
            relay = self._relays[host, port] = Relay(host, port)
            self._do(relay.listen())

    def hang_up(self, host: str, port: int) -> None:
        self._loop.call_soon_threadsafe(self._relays[host, port].hang_up)

    def swallow(self, host: str, port: int) -> None:
        self._loop.call_soon_threadsafe(self._relays[host, port].swallow)

    def pass_on(self, host: str, port: int) -> None:
        self._do(self._relays[host, port].pass_on())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(10.0)


@contextmanager
def running_relays() -> Iterator[Relays]:
    relays = Relays()
    with beside(lambda _: relays._loop.run_forever()):
        try:
            yield relays
        finally:
            for relay in relays._relays.values():
                relays._loop.call_soon_threadsafe(relay.hang_up)
            relays._loop.call_soon_threadsafe(relays._loop.stop)
