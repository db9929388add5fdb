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
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.nursery import TaskNursery
from kvstore.env.preludes import HANDSHAKE
from kvstore.env.shares import Shares
from kvstore.env.transport import join_address, split_address

log = logging.getLogger(__name__)

FIRST_BYTE_S = 5.0
"""A connection that brings nothing for so long is closed."""
CONNECT_S = 5.0
"""To the process's own port."""
ENDING_S = 5.0
"""For what is left once one side has ended: gRPC ends a connection in both directions at once. And for a side that
takes nothing to take what was sent before; then it is broken off."""
HOST = "127.0.0.1"
"""Of the ports behind it."""


class Front:
    """Listens on the port before the two, from `open` to `close`."""

    def __init__(
        self, connections_max: int, noted_plain: Callable[[], None], known: KnownNetworks | None = None
    ) -> None:
        """`noted_plain` is called for each connection without TLS. `known`: networks whose connections give way only to
        each other."""
        self._max, self._noted_plain = connections_max, noted_plain
        self._nursery = TaskNursery("front")
        self._acceptors: list[Acceptor] = []
        self._relays: Shares[_Relay] = Shares(KnownNetworks() if known is None else known)

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

    def take_in(self, relay: _Relay, host: str) -> bool:
        """Give a new connection a slot. If there is none, one of a network with more connections is broken off. Return
        False if there is no such connection."""
        network = network_of(host)
        if len(self._relays) >= self._max:
            gone = self._relays.displaced_by(network)
            if gone is None:
                return False
            self._relays.discard(gone)
            gone.break_off()
        self._relays.add(relay, network)
        return True

    def closed(self, relay: _Relay) -> None:
        self._relays.discard(relay)

    def connect(self, relay: _Relay, port: int, *, is_plain: bool) -> None:
        """Find the relay its other side."""
        if is_plain:
            self._noted_plain()
        self._nursery.spawn(relay.connect(port), name="relay")


class _Side(asyncio.Protocol):
    """One of the two connections of a relay: what it brings goes to the other, which may ask it to wait."""

    def __init__(self, half_ended: Callable[[], None], lost: Callable[[], None]) -> None:
        """`half_ended` is called when it has brought all that it will, `lost` when it is no more."""
        self._half_ended, self._lost = half_ended, lost
        self.transport: Any = None
        self.other: _Side | None = None
        self.has_ended = False
        """It brings nothing more."""
        self.is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "it has another side before it is read from"
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Say so to the other one. Where both have ended nothing comes on either any more: no transport that was kept
        open would be lost by itself."""
        self.has_ended = True
        if self.other is None or self.other.has_ended:
            return False
        if self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        self._half_ended()
        return True

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._lost()


class _Relay(_Side):
    """The connection that was accepted; by its first byte it finds the other one."""

    def __init__(self, front: Front, with_tls: int, without: int) -> None:
        super().__init__(self._end_soon, self._note_lost)
        self._front, self._with_tls, self._without = front, with_tls, without
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self._front.take_in(self, str((transport.get_extra_info("peername") or ("?", 0))[0])):
            self._is_over = True
            transport.abort()
            return
        self._do_later(FIRST_BYTE_S, self.end)

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
        side = _Side(self._end_soon, self._note_lost)
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
        if not side.has_ended:
            self._do_no_more()
        self.other = side
        side.transport.write(self._first)
        self._first = b""
        self.transport.resume_reading()

    def end(self) -> None:
        """End both sides, after what is to be sent has been, or cannot be."""
        if self._is_over:
            return
        self._is_over = True
        for side in self._sides():
            side.transport.close()
        self._do_later(ENDING_S, self.break_off)

    def _sides(self) -> list[_Side]:
        return [each for each in (self, self.other) if each is not None and each.transport is not None]

    def _end_soon(self) -> None:
        """The other direction has a moment left."""
        if not self._is_over:
            self._do_later(ENDING_S, self.end)

    def break_off(self) -> None:
        """End both sides at once."""
        self._is_over = True
        for side in self._sides():
            side.transport.abort()

    def _note_lost(self) -> None:
        """One that has not sent all is there still, with its socket, and is counted."""
        self.end()
        if all(side.is_lost for side in self._sides()):
            self._do_no_more()
            self._front.closed(self)

    def _do_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """That, and nothing that was to be done before."""
        self._do_no_more()
        self._timer = asyncio.get_running_loop().call_later(delay_s, what)

    def _do_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
