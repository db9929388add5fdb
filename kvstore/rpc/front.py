"""Accepts the connections of a gRPC server with TLS and forwards their bytes to one of the server's own loopback ports,
without reading them, so that TLS ends in gRPC.

gRPC's own listener counts connections from their accept and closes every new one when its slots are used up, so
unauthenticated peers could lock out everyone. This front shares the slots by network (kvstore/env/shares.py), and
starts a handshake only when its complete hello has arrived. In the TLS mode `prefer` (docs/protocol.md S1), the first
byte selects a port with or without TLS, which gRPC's listener cannot do.

gRPC sees this process as the client. `carried` has the real client's address of each connection
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
"""Maximum time to connect to the process's own port."""
ENDING_S = 5.0
"""Maximum time in seconds for the remaining bytes after one side has ended. gRPC ends both directions at once, and a
side may read nothing. After this time the connection is aborted."""
HOST = "127.0.0.1"
"""Host of the ports behind the front."""


class Front:
    """The public port of a gRPC server with TLS. It listens from `open` to `close` and forwards each connection."""

    def __init__(
        self,
        connections_max: int,
        noted_plain: Callable[[], None],
        known: KnownNetworks | None = None,
        carried: dict[str, str] | None = None,
    ) -> None:
        """`noted_plain` is called for each connection without TLS. A connection from one of the `known` networks is
        only aborted in favor of a connection from another known network. `carried` is filled while connections last:
        it maps the address that gRPC sees to the client's address, both in gRPC's form."""
        self._max, self._noted_plain = connections_max, noted_plain
        self._known = KnownNetworks() if known is None else known
        self.carried = {} if carried is None else carried
        self._nursery = TaskNursery("front")
        self._acceptors: list[Acceptor] = []
        self._relays: Shares[_Relay] = Shares(self._known)

    async def open(self, address: str, *, with_tls: int, without: int | None) -> int:
        """Listen on `address` (`host:port`) and return the bound port. Connections with TLS are forwarded to the
        loopback port `with_tls`, and connections without TLS to the port `without`. If `without` is None,
        connections without TLS are closed. Raises OSError."""
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
        log.info("%s accepts gRPC with TLS%s", join_address(host, found), "" if without is None else " and without")
        return found

    def stop(self) -> None:
        """Stop accepting connections. Existing connections continue."""
        for each in self._acceptors:
            each.close()

    async def close(self) -> None:
        """Stop accepting connections and end all existing ones."""
        self.stop()
        for relay in list(self._relays):
            relay.end()
        await self._nursery.close()

    def take_in(self, relay: _Relay, network: str) -> bool:
        """Give a new connection a slot and return True. If no slot is free, abort a connection of a network that has
        more connections than this network, or return False if there is no such network."""
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
        """Connect the relay to the loopback port `port`. `is_plain` is True if the client does not use TLS."""
        if is_plain:
            self._noted_plain()
        self._nursery.spawn(relay.connect(port), name="relay")


def _address_of(transport: Any, end: str) -> str:
    """Return the address of one end of a connection, `peername` or `sockname`, in gRPC's form."""
    host, port = (transport.get_extra_info(end) or ("?", 0))[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


class _Side(asyncio.Protocol):
    """One of the two connections of a relay. It writes the bytes that it receives to the other connection, which may
    pause it."""

    def __init__(self, half_ended: Callable[[], None], lost: Callable[[], None]) -> None:
        """`half_ended` is called when no more bytes will arrive, and `lost` when the connection is closed."""
        self._half_ended, self._lost = half_ended, lost
        self.transport: Any = None
        self.other: _Side | None = None
        self.has_ended = False
        """True if no more bytes will arrive."""
        self.is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "the other side exists before reading begins"
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        """Pass the end of the stream to the other side. Return False if both sides have ended, because a transport
        that stays open would never be reported as lost."""
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
    """A client's connection and the connection to the loopback port behind the front. The first bytes from the
    client select that port."""

    def __init__(self, front: Front, with_tls: int, without: int | None) -> None:
        super().__init__(self._end_soon, self._note_lost)
        self._front, self._with_tls, self._without = front, with_tls, without
        self._caller = self._inner = "?"
        """The client's address, and this process's address as gRPC sees it."""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the client has answered the server's part of the handshake, or the connection has ended."""
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
            self._open()  # the client continues after its hello
            self.other.transport.write(data)
            return
        if self._first:
            self._first += data  # read before the pause took effect
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
        """Connect to the loopback port and forward the bytes that have arrived."""
        side = _Side(self._end_soon, self._note_lost)
        side.other = self  # before connecting, because bytes may arrive first
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: side, HOST, port)
        except OSError as error:  # includes timeouts
            log.warning("cannot forward a connection to the port %d behind the front: %s", port, error)
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
        """Close both sides once everything has been sent or can no longer be sent."""
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
        """Close the connections after a short delay that lets the other direction finish."""
        if not self._is_over:
            self._do_later(ENDING_S, self.end)

    def break_off(self) -> None:
        """Abort both sides at once."""
        self._is_over = True
        self._open()
        for side in self._sides():
            side.transport.abort()

    def _note_lost(self) -> None:
        """Handle the loss of one side. A side that still has bytes to send keeps its socket and still counts as a
        connection."""
        self.end()
        if all(side.is_lost for side in self._sides()):
            self._do_no_more()
            if self._front.carried.get(self._inner) == self._caller:
                del self._front.carried[self._inner]
            self._front.closed(self)

    def _do_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Call `what` after `delay_s` seconds, and cancel the action that was scheduled before."""
        self._do_no_more()
        self._timer = asyncio.get_running_loop().call_later(delay_s, what)

    def _do_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
