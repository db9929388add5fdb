"""The Transport port on TCP. A handler is the event loop's own protocol, so nothing is between it and its bytes."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.env.accepting import Accepted, Acceptor, bind
from kvstore.env.dns.names import NAMES, Names
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.ports import Listener, Prelude, Stream, StreamHandler
from kvstore.env.preludes import NotUnderstood, call, speaks_no_tls
from kvstore.os_errors import is_shortage_here, reason_of

log = logging.getLogger(__name__)

SHORTAGE_S, SHORTAGE_ATTEMPTS = 0.1, 10
"""Delay in seconds between attempts to connect while this process lacks descriptors, memory or ports, and the
maximum number of attempts."""


class TcpListener:
    """A bound address that accepts connections until it is closed."""

    def __init__(
        self, acceptors: Sequence[Acceptor], address: str, closed: Callable[[TcpListener], None], *, is_lenient: bool
    ) -> None:
        self._acceptors, self._closed, self.is_lenient = acceptors, closed, is_lenient
        self.address = address

    def use(self, tls: ssl.SSLContext | None) -> None:
        """Use this TLS context for handshakes that begin from now on."""
        for each in self._acceptors:
            each.use(tls)

    def close(self) -> None:
        """Stop accepting connections. Accepted ones continue."""
        self._closed(self)
        for each in self._acceptors:
            each.close()


class TcpTransport:
    """TCP streams without delay (TCP_NODELAY). They use TLS if there are contexts for it: `serving` for listeners,
    `lenient` for listeners that accept clients without a certificate, and `calling` for connections to other
    processes."""

    def __init__(
        self,
        *,
        serving: ssl.SSLContext | None = None,
        calling: ssl.SSLContext | None = None,
        lenient: ssl.SSLContext | None = None,
        admits_plain: bool = False,
        newest: Callable[[], ssl.SSLContext] | None = None,
        names: Names = NAMES,
        known: KnownNetworks | None = None,
    ) -> None:
        """`admits_plain`: TLS is preferred, not required (docs/protocol.md S1). `newest` returns the context of each
        call, instead of `calling`. `names` looks hosts up. `known`: networks whose connections peers elsewhere do not
        displace; networks to which this transport has connected are added."""
        self._known = KnownNetworks() if known is None else known
        self._names = names
        self._newest = newest
        self._admits_plain = admits_plain and serving is not None
        self._plain_calls = 0
        self._serving, self._calling, self._lenient = serving, calling, lenient or serving
        self._listeners: set[TcpListener] = set()
        self._accepted = Accepted()

    async def listen(
        self,
        address: str,
        factory: Callable[[], StreamHandler],
        *,
        is_vital: bool = False,
        is_lenient: bool = False,
        prelude: Callable[[], Prelude] | None = None,
    ) -> Listener:
        """Listen on an address; port 0 picks a free port. Raises OSError if the address is taken or belongs to
        another machine."""
        host, port = split_address(address)
        sockets = await bind(host, port)
        bound = sockets[0].getsockname()[1]
        tls = self._lenient if is_lenient else self._serving
        acceptors = [
            Acceptor(
                each,
                factory,
                tls,
                self._accepted,
                is_vital=is_vital,
                prelude=prelude,
                admits_plain=self._admits_plain,
                known=self._known,
            )
            for each in sockets
        ]
        for each in acceptors:
            each.start()
        listener = TcpListener(acceptors, join_address(host, bound), self._listeners.discard, is_lenient=is_lenient)
        self._listeners.add(listener)
        return listener

    def use(
        self, serving: ssl.SSLContext | None, calling: ssl.SSLContext | None, lenient: ssl.SSLContext | None
    ) -> None:
        """Use these TLS contexts for all listeners and for new connections to others. Open connections keep theirs."""
        self._serving, self._calling, self._lenient = serving, calling, lenient
        for each in self._listeners:
            each.use(lenient if each.is_lenient else serving)

    def statistics(self) -> dict[str, int]:
        """Return counts of connections that have no handler yet, or never had one."""
        accepted = self._accepted
        return {
            "connections_opening": accepted.opening,
            "connections_timed_out_total": accepted.timed_out,
            "connections_gave_way_total": accepted.gave_way,
            "connections_refused_total": accepted.refused,
            "connections_plain_total": accepted.plain,
            "connections_plain_calls_total": self._plain_calls,
            "handshakes_unknown_total": accepted.unknown_handshakes,
        }

    async def connect(
        self, address: str, handler: StreamHandler, *, prelude: Callable[[], Prelude] | None = None
    ) -> Stream:
        """Connect to an address. The caller sets the deadline.

        Raises OSError, also for a malformed address, because other processes may register any text as their address. If
        the call raises an error after a connection was made, the handler is notified that the connection is lost. While
        this process lacks descriptors, memory or ports, it retries SHORTAGE_ATTEMPTS times, because the other side is
        not at fault.
        """
        for attempt in range(SHORTAGE_ATTEMPTS + 1):
            try:
                return await self._called(address, handler, prelude)
            except OSError as error:
                if not is_shortage_here(error) or attempt == SHORTAGE_ATTEMPTS:
                    raise
                log.warning(
                    "cannot connect yet, trying again address=%s reason=%s", address, reason_of(error, "connect")
                )
            await asyncio.sleep(SHORTAGE_S)
        raise AssertionError("the last attempt returns or raises")

    async def _called(self, address: str, handler: StreamHandler, prelude: Callable[[], Prelude] | None) -> Stream:
        calling = self._calling if self._newest is None else self._newest()
        try:
            return await self._connected(address, handler, calling, prelude)
        except OSError as error:
            if not (self._admits_plain and speaks_no_tls(error)):
                raise
            log.info("calling address=%s without TLS, because it seems to have none: %s", address, error)
        self._plain_calls += 1
        return await self._connected(address, handler, None, None)

    async def _connected(
        self, address: str, handler: StreamHandler, tls: ssl.SSLContext | None, prelude: Callable[[], Prelude] | None
    ) -> Stream:
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise OSError(f"no connection to {address!r}: {error}") from error
        failed = OSError(f"{host} has no address")
        for place in await self._names.find_soon(host):
            opening = _Opening(handler)
            try:
                stream = await _opened(opening, host, place, port, tls, prelude)
            except OSError as error:
                opening.give_up()
                failed = error
                if opening.was_made:  # the handler has lost a connection, and must not get a second one
                    raise
            except BaseException:
                opening.give_up()
                raise
            else:
                self._known.note(network_of(place))
                stream.set_protocol(handler)  # type: ignore[arg-type]
                return stream
        raise failed


async def _opened(
    opening: _Opening,
    host: str,
    place: str,
    port: int,
    tls: ssl.SSLContext | None,
    prelude: Callable[[], Prelude] | None,
) -> asyncio.Transport:
    """Return a connection to one address of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    name = None if tls is None else host
    sock = None if prelude is None or tls is None else await _talked(place, port, prelude())
    if sock is None:
        stream, _ = await loop.create_connection(lambda: opening, place, port, ssl=tls, server_hostname=name)
    else:
        stream, _ = await loop.create_connection(lambda: opening, sock=sock, ssl=tls, server_hostname=name)
    return stream


async def _talked(place: str, port: int, prelude: Prelude) -> socket.socket | None:
    """Return a connection after its prelude. None if the other side did not understand it: a bookie of ours from before
    preludes uses TLS from the first byte on. TLS is used in any case."""
    try:
        return await call(place, port, prelude)
    except NotUnderstood as error:
        log.debug("%s:%d is called by TLS from the first byte: %s", place, port, error)
        return None


class _Opening(asyncio.Protocol):
    """A protocol in front of a handler until connect returns. A handler whose connection was made is notified that it
    is lost, also if its caller is cancelled in between, which uvloop does not report."""

    def __init__(self, handler: StreamHandler) -> None:
        self._handler = handler
        self._stream: Any = None
        self._is_over = False

    @property
    def was_made(self) -> bool:
        """True if the handler was notified of a connection."""
        return self._stream is not None

    def connection_made(self, transport: Any) -> None:
        if self._is_over:
            transport.abort()
            return
        self._stream = transport
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._is_over else self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        if not self._is_over:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None and not self._is_over:
            self._is_over = True
            self._handler.connection_lost(exc)

    def give_up(self) -> None:
        """Abort the connection, because its caller has stopped waiting for it."""
        if self._stream is not None:
            self._stream.abort()
        self.connection_lost(None)
        self._is_over = True


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"expected host:port, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Join the two parts into one address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
