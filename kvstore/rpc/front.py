"""A port before two ports of one gRPC server, one with TLS and one without, while TLS is preferred (protocol.md S1).

gRPC's own listener cannot tell the two apart. The first byte can: it decides to which of the two a connection's bytes
are carried, unread, so that TLS ends in gRPC as ever. There is none where TLS is required. What gRPC sees as the
caller's address is this process's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvstore.env.accepting import Accepted, Acceptor, bind
from kvstore.env.nursery import TaskNursery
from kvstore.env.preludes import HANDSHAKE
from kvstore.env.transport import join_address, split_address

log = logging.getLogger(__name__)

FIRST_BYTE_S = 5.0
"""A connection that brings nothing for so long is closed."""
CONNECT_S = 5.0
"""To the process's own port."""
HOST = "127.0.0.1"
"""Of the ports behind it."""


class Front:
    """Listens on the port before the two, from `open` to `close`."""

    def __init__(self, connections_max: int, noted_plain: Callable[[], None]) -> None:
        """`noted_plain` is called for each connection without TLS."""
        self._max, self._noted_plain = connections_max, noted_plain
        self._nursery = TaskNursery("front")
        self._acceptors: list[Acceptor] = []
        self._relays: set[_Relay] = set()

    async def open(self, address: str, *, with_tls: int, without: int) -> int:
        """Carry what comes at `host:port` to one of the two ports; returns the port. Raises OSError."""
        host, port = split_address(address)
        sockets = await bind(host, port)
        found: int = sockets[0].getsockname()[1]

        def handler() -> Any:
            return _Relay(self, with_tls, without)

        self._acceptors = [Acceptor(each, handler, None, Accepted()) for each in sockets]
        for each in self._acceptors:
            each.start()
        log.info("%s takes gRPC with TLS and without", join_address(host, found))
        return found

    def stop(self) -> None:
        """Accept no more. What is carried goes on."""
        for each in self._acceptors:
            each.close()

    async def close(self) -> None:
        """End what is carried, too."""
        self.stop()
        for relay in list(self._relays):
            relay.end()
        await self._nursery.close()

    def is_full(self) -> bool:
        return len(self._relays) >= self._max

    def opened(self, relay: _Relay) -> None:
        self._relays.add(relay)

    def closed(self, relay: _Relay) -> None:
        self._relays.discard(relay)

    def connect(self, relay: _Relay, port: int, *, is_plain: bool) -> None:
        """Find the relay its other side."""
        if is_plain:
            self._noted_plain()
        self._nursery.spawn(relay.connect(port), name="relay")


class _Side(asyncio.Protocol):
    """One of the two connections of a relay: what it brings goes to the other, which may ask it to wait."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self.transport: Any = None
        self.other: _Side | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "it has another side before it is read from"
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other is not None and self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return self.other is not None

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


class _Relay(_Side):
    """The connection that was accepted; by its first byte it finds the other one."""

    def __init__(self, front: Front, with_tls: int, without: int) -> None:
        super().__init__(self.end)
        self._front, self._with_tls, self._without = front, with_tls, without
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._front.is_full():
            self._is_over = True
            transport.abort()
            return
        self._front.opened(self)
        self._timer = asyncio.get_running_loop().call_later(FIRST_BYTE_S, self.end)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)
            return
        if self._first:
            self._first += data  # the loop had read it before it was asked to wait
            return
        self._first, is_plain = data, not data.startswith(HANDSHAKE)
        self.transport.pause_reading()
        self._front.connect(self, self._without if is_plain else self._with_tls, is_plain=is_plain)

    async def connect(self, port: int) -> None:
        """Open the other side, and give it what has come."""
        side = _Side(self.end)
        side.other = self  # at once: what it brings may be here before this goes on
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: side, HOST, port)
        except OSError as error:  # a timeout is one, too
            log.warning("a connection cannot be carried to the port %d behind it: %s", port, error)
            self.end()
            return
        if self._is_over:
            side.transport.abort()
            return
        if self._timer is not None:
            self._timer.cancel()
        self.other = side
        side.transport.write(self._first)
        self._first = b""
        self.transport.resume_reading()

    def end(self) -> None:
        """End both sides, after what is to be sent has been."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._front.closed(self)
        for each in (self, self.other):
            if each is not None and each.transport is not None:
                each.transport.close()
