"""Listens for a gRPC server that has TLS, and carries the bytes of each connection to one of the server's own ports on
loopback, unread, so that TLS ends in gRPC.

gRPC's own listener counts connections from their accept and closes whoever comes when the slots are used up: strangers
who hold them keep everybody out. Here the slots are shared by network (kvstore/env/shares.py), and a handshake begins
only once its whole hello is there. While TLS is preferred (docs/protocol.md S1), the first byte decides between a port
with TLS and one without, which gRPC's listener could not tell apart.

gRPC sees this process as the caller. `carried` has the caller's own address for each connection
(kvstore/rpc/callers.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvstore.env.accepting import Accepted, Acceptor, bind
from kvstore.env.networks import KnownNetworks, address_of
from kvstore.env.nursery import TaskNursery
from kvstore.env.preludes import HANDSHAKE
from kvstore.env.shares import Shares
from kvstore.env.transport import join_address, split_address

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""To the process's own port."""
ENDING_S = 5.0
"""For what is left once one side has ended: gRPC ends a connection in both directions at once. And for a side that
takes nothing to take what was sent before; then it is broken off."""
HOST = "127.0.0.1"
"""Of the ports behind it."""


class Front:
    """Listens on the port before a gRPC server's own, from `open` to `close`."""

    def __init__(
        self,
        connections_max: int,
        noted_plain: Callable[[], None],
        known: KnownNetworks | None = None,
        carried: dict[str, str] | None = None,
    ) -> None:
        """`noted_plain` is called for each connection without TLS. `known`: networks whose connections give way only to
        each other. `carried` gets the address of each caller by the address that gRPC sees, both as gRPC names them."""
        self._max, self._noted_plain = connections_max, noted_plain
        self._known = KnownNetworks() if known is None else known
        self.carried = {} if carried is None else carried
        self._nursery = TaskNursery("front")
        self._acceptors: list[Acceptor] = []
        self._relays: Shares[_Relay] = Shares(self._known)

    async def open(self, address: str, *, with_tls: int, without: int | None) -> int:
        """Carry what comes at `host:port` to one of the two ports; returns the port. `without`: the port for
        connections without TLS; None: they are closed. Raises OSError."""
        host, port = split_address(address)
        sockets = await bind(host, port)
        found: int = sockets[0].getsockname()[1]

        def handler() -> Any:
            return _Relay(self, with_tls, without)

        self._acceptors = [
            Acceptor(each, handler, None, Accepted(), carries=True, known=self._known) for each in sockets
        ]
        for each in self._acceptors:
            each.start()
        log.info("%s takes gRPC with TLS%s", join_address(host, found), "" if without is None else " and without")
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

    def take_in(self, relay: _Relay, network: str) -> bool:
        """Give a new connection a slot. If there is none, one of a network with more connections is broken off. Return
        False if there is no such connection."""
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


def _address_of(transport: Any, end: str) -> str:
    """Return the address of one end of a connection, `peername` or `sockname`, as gRPC names addresses."""
    host, port = (transport.get_extra_info(end) or ("?", 0))[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


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
    """The connection that was accepted; by its first bytes it finds the other one."""

    def __init__(self, front: Front, with_tls: int, without: int | None) -> None:
        super().__init__(self._end_soon, self._note_lost)
        self._front, self._with_tls, self._without = front, with_tls, without
        self._caller = self._inner = "?"
        """The addresses of the caller, and of this process as gRPC sees it."""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the client has answered the server's part of the handshake, or the connection is over."""
        self._first = b""
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._caller = _address_of(transport, "peername")
        if not self._front.take_in(self, address_of(self._caller)):
            self._is_over = True
            self._open()
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self._open()  # the client goes on after its hello
            self.other.transport.write(data)
            return
        if self._first:
            self._first += data  # the loop had read it before it was asked to wait
            return
        self._first, is_plain = data, not data.startswith(HANDSHAKE)
        port = self._without if is_plain else self._with_tls
        if port is None:
            self.end()
        else:
            self.transport.pause_reading()
            self._front.connect(self, port, is_plain=is_plain)

    def _open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

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
        self._inner = _address_of(side.transport, "sockname")
        self._front.carried[self._inner] = self._caller
        self.other = side
        side.transport.write(self._first)
        self._first = b""
        self.transport.resume_reading()

    def end(self) -> None:
        """End both sides, after what is to be sent has been, or cannot be."""
        if self._is_over:
            return
        self._is_over = True
        self._open()
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
        self._open()
        for side in self._sides():
            side.transport.abort()

    def _note_lost(self) -> None:
        """One that has not sent all is there still, with its socket, and is counted."""
        self.end()
        if all(side.is_lost for side in self._sides()):
            self._do_no_more()
            if self._front.carried.get(self._inner) == self._caller:
                del self._front.carried[self._inner]
            self._front.closed(self)

    def _do_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """That, and nothing that was to be done before."""
        self._do_no_more()
        self._timer = asyncio.get_running_loop().call_later(delay_s, what)

    def _do_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
