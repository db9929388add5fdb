"""Accepts the connections of one listening socket, and bounds them before anything is known of their clients.

A TLS connection passes two stages, each with its own slots. First it waits, as a bare socket, until the client's whole
hello has arrived: a client that sends half of one costs a descriptor and no handshake. Then it is in its handshake.
Both stages assign slots by network (kvstore/env/shares.py). When the waiting slots run out, the oldest connection of
the network with the most of them is closed. When the handshake slots run out, a connection waits for its turn, unless
its network has fewer slots than another: then it displaces the oldest of that one. So unauthenticated peers of one
network, or of many, keep out neither clients elsewhere nor the nodes of the cluster.

Slots bound how many peers wait at a time, and allowances (kvstore/env/allowance.py) bound the time that the event loop
spends on them: networks that have not authenticated begin few handshakes a second, and few of their connections a
second displace others.

The kernel assigns the lowest free descriptor, so a high number means that all lower ones are taken. Connections with
such numbers are closed, and the numbers above stay free for files. If the process or the machine has no descriptor
left, nothing is accepted for a while.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from kvstore.env.allowance import Allowance
from kvstore.env.dns.names import NAMES
from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.nursery import TaskNursery
from kvstore.env.ports import Prelude, StreamHandler
from kvstore.env.preludes import finish_prelude, wait_for_hello, wants_tls
from kvstore.env.shares import Shares
from kvstore.os_errors import has_no_such_address, reason_of

log = logging.getLogger(__name__)

BACKLOG_MAX = 1024
"""Connections that the kernel holds before they are accepted."""
ACCEPTS_MAX = 64
"""Maximum number of accepts in one turn of the event loop."""
WAITING_MAX, WAITING_SHARE = 512, 32
"""Maximum number of connections of one port that wait for their client's hello or for a handshake slot; also at most
one 32nd of the process's descriptors."""
OPENING_S = 5.0
"""Maximum time from the accept of a connection to the end of its TLS handshake."""
HANDSHAKES_MAX = 64
"""Maximum number of concurrent handshakes of one port. Each takes tens of KiB, so there are fewer of them than of
waiting connections."""
HANDSHAKE_SURE_S = 1.0
"""Time for which a handshake keeps its slot however many connections of its own network wait, in seconds. On a busy
machine 64 handshakes take some hundred milliseconds. If the oldest was displaced earlier, nearly finished handshakes
would be, and hardly one of a thousand clients would get in."""
UNKNOWN_PER_S, UNKNOWN_SAVED = 10, 20
"""Handshakes of one port that begin in a second for unknown networks, and the maximum number of saved ones. A handshake
takes 0.5 to 1.1 ms of the event loop, so at four ports they are a twentieth of its time. Handshakes after which a
client authenticates do not count."""
BEGUN_MAX, BEGUN_S = 4, 0.005
"""Maximum number of handshakes of one port that begin within BEGUN_S seconds. Each takes a signature: if all slots were
assigned in one turn of the event loop, everything else in it would wait for all of them."""
CLOSED_MAX, CLOSED_PAUSE_S = 8, 0.02
"""After closing CLOSED_MAX connections for lack of waiting slots the port accepts nothing for CLOSED_PAUSE_S seconds,
and newcomers wait in the kernel. Otherwise peers that reconnect as fast as they are closed would take the event loop
from clients. With 4, clients and probes from known networks waited in the kernel for 300 ms behind these peers."""
DISPLACING_PER_S, DISPLACING_SAVED = 20, 20
"""Connections of unknown networks that may displace a waiting one in a second, although others of their network wait at
the port, and the maximum number of saved ones. Further connections of such networks are closed at once, which takes a
third of the time."""
PAUSE_S = 0.1
"""Pause of accepting when there is no capacity, in seconds."""
FILES_SHARE, FILES_MAX = 4, 1024
"""Descriptors that are reserved for files: a quarter of those that the process may have, at most FILES_MAX."""
SILENT_S, ASK_S, ASKS = 60, 20, 3
"""Keepalive: after SILENT_S seconds of silence the kernel probes the peer every ASK_S seconds, and drops the connection
after ASKS probes without an answer. Otherwise a connection to a machine that lost power would be held forever. If data
were sent, the kernel drops the connection by itself after a quarter of an hour."""
LOG_S = 10.0
"""Minimum time between two log lines about one port, in seconds."""
LOG_PLAIN_S = 60.0
"""Minimum time between two log lines that name a client without TLS, in seconds."""


@dataclass(slots=True)
class Accepted:
    """Counts of connections that ended, or wait, before any handler had them."""

    opening: int = 0
    timed_out: int = 0
    gave_way: int = 0
    refused: int = 0
    """Connections that were closed for lack of descriptors."""
    plain: int = 0
    """Connections without TLS on ports that prefer it."""
    unknown_handshakes: int = 0
    """Handshakes that began for networks that had not authenticated."""


class Carrier(Protocol):
    """A handler that passes the bytes of a TLS handshake to another component."""

    opened: asyncio.Future[None]
    """Done when the handshake or the connection has ended."""

    def break_off(self) -> None:
        """End the connection at once."""


@dataclass(slots=True)
class _Turn:
    """A connection that waits for a handshake slot."""

    network: str
    come: asyncio.Future[None]


class Acceptor:
    """Accepts the connections of one socket, and closes the socket. `start` begins, `close` ends it; accepted
    connections continue."""

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
        known: KnownNetworks | None = None,
        carries: bool = False,
    ) -> None:
        """`admits_plain`: connections that do not begin with TLS are accepted and counted. `known`: networks that peers
        elsewhere do not displace. `carries`: handlers pass the bytes of handshakes to another component (`Carrier`)."""
        self._admits_plain, self._carries = admits_plain, carries
        self._socket, self._factory, self._accepted, self._is_vital = sock, factory, accepted, is_vital
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._prelude = prelude
        self._nursery = TaskNursery("accept")
        self._known = KnownNetworks() if known is None else known
        self._waiting: Shares[socket.socket] = Shares(self._known)
        """Connections whose client has not sent its whole hello, or that wait for a handshake slot."""
        self._handshakes: Shares[socket.socket] = Shares(self._known)
        self._allowance = Allowance(self._known, UNKNOWN_PER_S, UNKNOWN_SAVED)
        """Handshakes that begin."""
        self._displacing = Allowance(self._known, DISPLACING_PER_S, DISPLACING_SAVED)
        """Connections that displace waiting ones although others of their network wait."""
        self._turns: dict[socket.socket, _Turn] = {}
        """Waiting connections that are ready for their handshake, the oldest first."""
        self._next_turns: asyncio.TimerHandle | None = None
        self._begun = 0
        """Number of handshakes that have begun within BEGUN_S."""
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_S
        self._plain_logged_at = -LOG_PLAIN_S
        self._is_closed = False

    @property
    def _expects_tls(self) -> bool:
        return self._tls is not None or self._carries

    def start(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def use(self, tls: ssl.SSLContext | None) -> None:
        """Use this context for handshakes that begin from now on."""
        self._tls = tls

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        for timer in (self._timer, self._next_turns):
            if timer is not None:
                timer.cancel()
        self._socket.close()

    def _accept(self) -> None:
        refused, closed, files_max = False, 0, files_for_connections(is_vital=self._is_vital)
        for _ in range(ACCEPTS_MAX):
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                return self._pause(reason_of(error, "accept"), PAUSE_S)
            if sock.fileno() >= files_max:
                self._accepted.refused += 1
                refused = True
                sock.close()
            else:
                closed += self._open(sock, network_of(address[0]))
            if closed == CLOSED_MAX:
                return self._pause(f"{len(self._waiting)} connections wait for their TLS handshake", CLOSED_PAUSE_S)
        if refused:
            self._pause(f"{files_max} descriptors are taken, and the others are reserved for files", PAUSE_S)

    def _pause(self, reason: str, delay_s: float) -> None:
        now = self._loop.time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            log.warning("port %d is flooded: %s", self._socket.getsockname()[1], reason)
        self._loop.remove_reader(self._socket.fileno())
        self._timer = self._loop.call_later(delay_s, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _open(self, sock: socket.socket, network: str) -> bool:
        """Register an accepted connection. Returns True if this connection or another one was closed for lack of
        slots."""
        sock.setblocking(False)
        if not self._expects_tls:
            self._nursery.spawn(self._hand_over(sock, network), name="connection")
            return False
        is_full = len(self._waiting) >= waiting_max()
        if is_full and not self._may_displace(network):
            self._accepted.gave_way += 1
            sock.close()
            return True
        self._accepted.opening += 1
        self._waiting.add(sock, network)
        self._nursery.spawn(self._hand_over(sock, network), name="connection")
        if is_full:
            self._displace(self._waiting.first_to_go())
        return is_full

    def _may_displace(self, network: str) -> bool:
        """Return True if a connection from a network may displace a waiting one. It may if the network is known or has
        no waiting connection. Otherwise it uses up one unit of the allowance, if one is left."""
        if network in self._known or not self._waiting.count(network):
            return True
        now = self._loop.time()
        is_left = self._displacing.is_left(now)
        if is_left:
            self._displacing.take(network, now)
        return is_left

    def _displace(self, sock: socket.socket | None) -> None:
        """End a connection before or in its handshake as if its client had. Its task is not cancelled: the handshake
        may end in this turn, and uvloop would not notify the handler, which owns the connection then."""
        assert sock is not None, "slots that run out have occupants"
        self._accepted.opening -= self._leave(sock)
        self._accepted.gave_way += 1
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _ended(self, sock: socket.socket) -> None:
        """Free the slot of a connection that a handler owns or that has ended."""
        had_handshake = sock in self._handshakes
        self._accepted.opening -= self._leave(sock)
        if had_handshake:
            self._give_turns()

    def _leave(self, sock: socket.socket) -> bool:
        """Free the slot of a connection. Return True if it had one."""
        turn = self._turns.pop(sock, None)
        if turn is not None and not turn.come.done():
            turn.come.set_exception(ConnectionResetError("the connection was displaced"))
        return self._waiting.discard(sock) or self._handshakes.discard(sock)

    async def _hand_over(self, sock: socket.socket, network: str) -> None:
        """Pass the connection to a handler after its handshake. Failures are not reported, because no handler knows
        of the connection."""
        try:
            left_s = await self._until_handshake(sock, network) if self._expects_tls else None
            if left_s is None:
                self._ended(sock)  # the connection waits for nothing more, and nobody may displace it
            is_carried = left_s is None or self._carries
            options: Any = {} if is_carried else {"ssl": self._tls, "ssl_handshake_timeout": left_s}
            _, handler = await self._loop.connect_accepted_socket(self._factory, sock, **options)  # type: ignore[type-var]
            if left_s is not None and self._carries:
                await _carried(cast("Carrier", handler), left_s)
        except (ConnectionAbortedError, TimeoutError):
            self._accepted.timed_out += sock in self._waiting or sock in self._handshakes
        except OSError as error:
            log.debug("a connection ended in its handshake: %s", error)
        finally:
            self._ended(sock)

    async def _until_handshake(self, sock: socket.socket, network: str) -> float | None:
        """Wait until the connection has its handshake slot. Returns the seconds that are left for the handshake, or
        None if there is no handshake. Both have OPENING_S together."""
        began = self._loop.time()
        async with asyncio.timeout(OPENING_S):
            if (self._admits_plain or self._carries) and not await wants_tls(sock, self._prelude):
                if self._admits_plain:
                    self._note_plain(sock)
                return None
            if self._prelude is not None:
                await finish_prelude(sock, self._prelude)
            await wait_for_hello(sock)
            await self._slot(sock, network)
        return max(OPENING_S - (self._loop.time() - began), 0.001)

    # ── handshake slots ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _slot(self, sock: socket.socket, network: str) -> None:
        """Wait for a handshake slot. The socket is closed if this is cancelled. Raises ConnectionResetError if the
        connection was displaced meanwhile."""
        if sock not in self._waiting:
            sock.close()
            raise ConnectionResetError("the connection was displaced")
        turn = _Turn(network, self._loop.create_future())
        self._turns[sock] = turn
        has_slot = len(self._handshakes) < HANDSHAKES_MAX or self._handshakes.displaced_by(network) is not None
        if has_slot and (network in self._known or self._allowance.is_left(self._loop.time())):
            self._give_turns()
        else:  # earlier connections have no turn either, and checking all of them each time would be costly
            self._give_turns_later()
        try:
            await turn.come
        except BaseException:
            sock.close()
            raise

    def _give_turns(self) -> None:
        """Begin the handshakes that may begin: first those of known networks and of few others, then of networks with
        the fewest slots, and among those of the network whose last handshake began first."""
        while self._turns and self._begun < BEGUN_MAX:
            sock = self._next_or_none()
            if sock is None:
                return self._give_turns_later()
            if len(self._handshakes) >= HANDSHAKES_MAX:
                displaced = self._handshakes.displaced_by(self._turns[sock].network) or self._overdue()
                if displaced is None:
                    return self._give_turns_later()
                self._displace(displaced)
            turn = self._turns.pop(sock)
            self._waiting.discard(sock)
            self._handshakes.add(sock, turn.network, self._loop.time())
            self._allowance.take(turn.network, self._loop.time())
            self._accepted.unknown_handshakes += turn.network not in self._known
            self._begun += 1
            if self._begun == 1:
                self._loop.call_later(BEGUN_S, self._begin_more)
            if not turn.come.done():
                turn.come.set_result(None)
        return None

    def _next_or_none(self) -> socket.socket | None:
        """Return the connection whose handshake is next, or None if the networks of all of them have to wait."""
        if self._allowance.is_left(self._loop.time()):
            return min(self._turns, key=self._order)
        known = [sock for sock, turn in self._turns.items() if turn.network in self._known]
        return min(known, key=self._order, default=None)

    def _begin_more(self) -> None:
        self._begun = 0
        self._give_turns()

    def _order(self, sock: socket.socket) -> tuple[bool, int, float]:
        network = self._turns[sock].network
        return *self._handshakes.order_of(network), self._allowance.last(network)

    def _overdue(self) -> socket.socket | None:
        """Return the oldest handshake of the fullest network if its guaranteed time is over."""
        oldest = self._handshakes.first_to_go()
        assert oldest is not None, "slots that run out have occupants"
        return oldest if self._loop.time() - self._handshakes.since(oldest) >= HANDSHAKE_SURE_S else None

    def _give_turns_later(self) -> None:
        """Try again when the allowance has grown or the oldest handshake's guaranteed time is over. A handshake that
        ends frees its slot sooner."""
        if self._next_turns is None and not self._is_closed:
            self._next_turns = self._loop.call_later(1 / UNKNOWN_PER_S, self._give_turns_again)

    def _give_turns_again(self) -> None:
        self._next_turns = None
        self._give_turns()

    def _note_plain(self, sock: socket.socket) -> None:
        self._accepted.plain += 1
        now = self._loop.time()
        if now - self._plain_logged_at >= LOG_PLAIN_S:
            self._plain_logged_at = now
            with suppress(OSError):
                port, caller = sock.getsockname()[1], sock.getpeername()[0]
                log.warning("port %d: %s connects without TLS; the mode is prefer, which allows it", port, caller)


async def _carried(carrier: Carrier, left_s: float) -> None:
    """Wait until the handshake that the carrier passes on is over. Break it off if it takes longer than `left_s`."""
    try:
        async with asyncio.timeout(left_s):
            await carrier.opened
    except TimeoutError:
        carrier.break_off()
        raise


def waiting_max() -> int:
    """Return how many connections of one port may wait for their handshake slot."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WAITING_MAX if files == resource.RLIM_INFINITY else min(WAITING_MAX, max(1, files // WAITING_SHARE))


def files_for_connections(*, is_vital: bool = False) -> int:
    """Return the number below which a descriptor may be a connection's. Vital connections may have half of those
    reserved for files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return 1 << 30
    kept = min(files // FILES_SHARE, FILES_MAX)
    return files - (kept // 2 if is_vital else kept)


async def bind(host: str, port: int) -> Sequence[socket.socket]:
    """Return a listening socket for each address that the host has here. Raises OSError."""
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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
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
