"""Accepts the connections of one listening socket. They count from here on, before anything is known of them.

What is accepted and not yet a handler's is in its TLS handshake: there are OPENING_MAX of these at most, each for
OPENING_S at most, and the oldest gives way to one more: of those on which nothing has come, if there are. Descriptors
are given from the lowest free number on, so one that has a high number says that all below are taken: connections that
have such numbers are closed, and what is above stays for files. Where the process, or the machine, has no descriptor
left, nothing is accepted for a while.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.env.dns.names import NAMES
from kvstore.env.nursery import TaskNursery
from kvstore.env.ports import Prelude, StreamHandler
from kvstore.env.preludes import hear_out, wants_tls
from kvstore.os_errors import has_no_such_address, reason_of

log = logging.getLogger(__name__)

BACKLOG_MAX = 1024
"""Connections that the kernel holds before they are accepted."""
ACCEPTS_MAX = 64
"""In one turn of the event loop."""
OPENING_MAX = 128
"""Connections of one port that are in their TLS handshake."""
OPENING_S = 5.0
"""What a TLS handshake may take."""
OPENING_SURE_S, OPENING_HEARD_S = 0.5, 2.5
"""What it may take however many come after it; the second once its client has said something. On a busy machine 128
handshakes take longer than the first: where each crowd ended the oldest, which were the next to be done, hardly one of
a thousand clients came in."""
_BYTES_RECEIVED = slice(128, 136)
"""Of the kernel's struct tcp_info."""
REST_S = 0.1
"""How long nothing is accepted when there is no room."""
FILES_SHARE, FILES_MAX = 4, 1024
"""A quarter of the descriptors that the process may have, but not more than so many, are no connection's."""
SILENT_S, ASK_S, ASKS = 60, 20, 3
"""Where nothing comes on a connection the kernel asks, after SILENT_S and then every ASK_S, whether the other side is
still there; after ASKS without an answer it is lost. Else one whose machine has lost its power would be held for ever.
Where something was sent the kernel gives up by itself, after a quarter of an hour."""
SAY_S = 10.0
"""Between two lines in the log about one port."""
SAY_PLAIN_S = 60.0
"""Between two that name a client without TLS."""


@dataclass(slots=True)
class Accepted:
    """Counts connections by their fate before any handler has them."""

    opening: int = 0
    timed_out: int = 0
    gave_way: int = 0
    refused: int = 0
    """For want of descriptors."""
    plain: int = 0
    """Without TLS, where it is preferred."""


class Acceptor:
    """Accepts the connections of one socket, which it closes. `start` begins, `close` ends it; what was accepted goes
    on."""

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], StreamHandler],
        tls: ssl.SSLContext | None,
        accepted: Accepted,
        *,
        is_vital: bool = False,
        prelude: Callable[[], Prelude] | None = None,
        admits_plain: bool = False,
    ) -> None:
        """`admits_plain`: what begins otherwise than with TLS is let in without, and counted."""
        self._admits_plain = admits_plain
        self._socket, self._factory, self._accepted, self._is_vital = sock, factory, accepted, is_vital
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._prelude = prelude
        self._nursery = TaskNursery("accept")
        self._silent: dict[socket.socket, float] = {}
        """In their handshake, since when; the oldest is the first."""
        self._heard: dict[socket.socket, float] = {}
        """The same of those on which something is known to have come."""
        self._timer: asyncio.TimerHandle | None = None
        self._said_at = -SAY_S
        self._plain_said_at = -SAY_PLAIN_S
        self._is_closed = False

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def use(self, tls: ssl.SSLContext | None) -> None:
        """Take this for handshakes that begin from now on."""
        self._tls = tls

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _accept(self) -> None:
        has_refused, files_max = False, files_for_connections(is_vital=self._is_vital)
        for _ in range(ACCEPTS_MAX):
            is_crowded = len(self._silent) + len(self._heard) > OPENING_MAX
            if is_crowded and not self._make_room():  # one more has come, and only then
                return self._rest(f"{OPENING_MAX} connections are in their TLS handshake")
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                return self._rest(reason_of(error, "accept"))
            if sock.fileno() >= files_max:
                self._accepted.refused += 1
                has_refused = True
                sock.close()
            else:
                self._open(sock)
        if has_refused:
            self._rest(f"{files_max} descriptors are taken, and the others are for files")

    def _make_room(self) -> bool:
        """End the oldest handshake, if it has had its time; of those on which nothing has come, if there are."""
        now = self._loop.time()
        while self._silent:
            sock, since = next(iter(self._silent.items()))
            if now - since < OPENING_SURE_S:
                break
            if not _has_heard(sock):
                self._give_way(sock)
                return True
            self._heard[sock] = self._silent.pop(sock)
        for sock, since in self._heard.items():
            if now - since < OPENING_HEARD_S:
                break
            self._give_way(sock)
            return True
        return False

    def _give_way(self, sock: socket.socket) -> None:
        """End a handshake as if its client had. Its task is not cancelled: the handshake may be over in this turn, and
        by uvloop the handler, which has the connection then, would not be told."""
        self._ended(sock)
        self._accepted.gave_way += 1
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _rest(self, reason: str) -> None:
        now = self._loop.time()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            log.warning("port %d is flooded: %s", self._socket.getsockname()[1], reason)
        self._loop.remove_reader(self._socket.fileno())
        self._timer = self._loop.call_later(REST_S, self._go_on)

    def _go_on(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._nursery.spawn(self._hand_over(sock), name="connection")
        if self._tls is not None:  # else there is no handshake to wait for
            self._accepted.opening += 1
            self._silent[sock] = self._loop.time()

    def _ended(self, sock: socket.socket) -> None:
        if self._silent.pop(sock, None) is not None or self._heard.pop(sock, None) is not None:
            self._accepted.opening -= 1

    async def _hand_over(self, sock: socket.socket) -> None:
        """Give the connection a handler, after its handshake. If that fails nobody is told: nobody knew of it."""
        try:
            options = await self._until_handshake(sock) if self._tls else {}
            if not options:
                self._ended(sock)  # nothing is left to wait for, and nobody may end it
            await self._loop.connect_accepted_socket(self._factory, sock, **options)  # type: ignore[type-var]
        except (ConnectionAbortedError, TimeoutError):
            self._accepted.timed_out += 1
        except OSError as error:
            log.debug("a connection ended in its handshake: %s", error)
        finally:
            self._ended(sock)

    async def _until_handshake(self, sock: socket.socket) -> dict[str, Any]:
        """Wait until the connection is ready for its handshake; returns what that is done by. Both in OPENING_S."""
        left_s = OPENING_S
        if self._prelude is not None or self._admits_plain:
            began = self._loop.time()
            async with asyncio.timeout(OPENING_S):
                if self._admits_plain and not await wants_tls(sock, self._prelude):
                    self._note_plain(sock)
                    return {}
                if self._prelude is not None:
                    await hear_out(sock, self._prelude)
            left_s = max(OPENING_S - (self._loop.time() - began), 0.001)
        return {"ssl": self._tls, "ssl_handshake_timeout": left_s}

    def _note_plain(self, sock: socket.socket) -> None:
        self._accepted.plain += 1
        now = self._loop.time()
        if now - self._plain_said_at >= SAY_PLAIN_S:
            self._plain_said_at = now
            with suppress(OSError):
                port, caller = sock.getsockname()[1], sock.getpeername()[0]
                log.warning("port %d: %s connects without TLS; mode is prefer, so it may", port, caller)


def _has_heard(sock: socket.socket) -> bool:
    """Whether anything has come on this connection. A kernel that does not say so has nothing heard."""
    with suppress(OSError):
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)[_BYTES_RECEIVED]
        return int.from_bytes(found, sys.byteorder) > 0
    return False


def files_for_connections(*, is_vital: bool = False) -> int:
    """Descriptors below this number may be a connection's. What is kept for files, vital ones may have half of."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return 1 << 30
    kept = min(files // FILES_SHARE, FILES_MAX)
    return files - (kept // 2 if is_vital else kept)


async def bind(host: str, port: int) -> Sequence[socket.socket]:
    """A listening socket for each address that the host has here. Raises OSError."""
    flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    places = await NAMES.find_soon(host)
    found = [each for place in places for each in socket.getaddrinfo(place, port, type=socket.SOCK_STREAM, flags=flags)]
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    for family, _, _, _, address in sorted(set(found)):
        try:
            sockets.append(_listening(family, address))
        except OSError as error:
            failed = error
            if not has_no_such_address(error):
                break
    if sockets and (failed is None or has_no_such_address(failed)):
        return sockets
    for each in sockets:
        each.close()
    assert failed is not None, "a host that is resolved has an address"
    raise OSError(failed.errno, f"cannot listen on {host}:{port}: {(failed.strerror or str(failed)).lower()}")


def _listening(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted inherits it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # and these
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKS)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG_MAX)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
