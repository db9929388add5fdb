"""A session with ZooKeeper, kept alive forever: kazoo's client in its threads, its states and answers on the event
loop.

Kazoo's behaviour that must be prevented, and how:

- It queues requests while disconnected, without bound, and sends them when it is back, even in a new session.
  GuardedClient refuses a request unless the connection is up. It holds one lock for the check and for the change of
  state, so that kazoo's queue is empty whenever it connects.
- It wakes its thread by one byte for each request, through a pair of sockets that holds 277 of them and then blocks the
  event loop, which has the lock that the thread needs. A pipe holds 64 Ki, and the queue is bounded.
- It never notices a silent server while requests keep it busy, because each counts as a ping. A call past its deadline
  breaks the connection (`break_connection`).
- Its thread ends for good after an answer that it does not understand, and after unexpected errors of the machine.
  ZooKeeperSession then starts a new client, which continues the session.
- Its thread ends after a refused login. ZooKeeperSession then starts a new client after a delay, and logs it.
- It waits for as long as a session lasts for a connection with a host that is off and, if there is one server, for the
  answer to a connection. A ZooKeeper that starts never answers clients that came before it had loaded its data, and
  does not close their connections either, so that the session would be over. GuardedClient waits for a third of that
  time.
- It takes a server that goes away within a login by SASL for one that refuses the login. GuardedClient believes the
  third refusal.
- It looks hosts up one after the other, for as long as the name server lets it. GuardedClient looks all of them up at
  once, with our own lookup.
- It calls listeners on the connection's thread, where any call would deadlock. They only post to the loop.
- Its thread sends heartbeats whether or not the process works. The watchdog ends the session from its own thread
  if it has no evidence of that (`give_up`). The next client starts when the evidence is back (docs/protocol.md, P45).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any, NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, ConnectionDropped, SessionClosedRequireSaslError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import _CONNECTION_DROP
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from kvstore.env.dns.names import NAMES
from kvstore.env.liveness.port import UNWATCHED, Liveness
from kvstore.env.tls import Tls
from kvstore.errors import ConfigError
from kvstore.extras import install_hint
from kvstore.meta.login import Acl, Mechanism, MetadataLogin
from kvstore.meta.store import SessionState

log = logging.getLogger(__name__)
# Through an outage kazoo reports each attempt. Only changes of state are logged here.
_kazoo_log = logging.getLogger(f"{__name__}.kazoo")
_kazoo_log.setLevel(logging.ERROR)

RECONNECT_DELAY_MAX_S = 0.7
RECONNECT_JITTER = 0.4
RESTART_DELAY_S = 1.0
REFUSED_DELAY_S = 5.0
"""Delay between a refused login and the next one, in seconds."""
ANSWER_SHARE = 1 / 3
"""Share of the session's time to connect, and to wait for the answer to a connection: what kazoo gives each server of
three."""
LOGIN_ATTEMPTS = 3
"""A server that refuses a login by SASL drops the connection, and so does a server that stops. This many in a row count
as a refusal."""
CLOSE_TIMEOUT_S = 3.0
QUEUED_MAX = 4_000
"""Maximum number of requests that wait for kazoo's thread; more are refused. A byte for each fits in a pipe of one
page."""


class NotSent(Exception):
    """The request was refused before it left this process."""


class PipeEnd:
    """An end of a pipe, with the methods of a socket that kazoo calls."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def recv(self, size: int) -> bytes:
        return os.read(self._fd, size)

    def send(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # the number may soon be another file's
        if fd >= 0:
            os.close(fd)


class PipeHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's threads, woken through a pipe."""

    def create_socket_pair(self) -> tuple[PipeEnd, PipeEnd]:
        reader, writer = os.pipe()
        return PipeEnd(reader), PipeEnd(writer)

    def create_connection(self, *where: Any, timeout: float, **how: Any) -> Any:
        """Connect within a part of the session's time, so that a host that is off leaves some for the others."""
        return super().create_connection(*where, timeout=timeout * ANSWER_SHARE, **how)


class Resumable(NamedTuple):
    """The session of a client that has ended, for the next client to continue."""

    id: tuple[int, bytes]
    """Id and password of the session."""
    zxid: int
    """Last transaction that was seen: a server that has seen less is not used."""


class GuardedClient(KazooClient):  # type: ignore[misc]
    """Kazoo's client, except that it accepts requests only while connected, and reports every change of its state from
    its threads."""

    def __init__(self, changed: Callable[[GuardedClient, str, int], None], **options: Any) -> None:
        """`changed` gets the client, kazoo's state, and the number of this client's connections so far."""
        self._changed = changed
        self._guard = threading.RLock()
        self._connections = 0
        self.known_connection = 0
        """Number of the connection that the event loop knows. Requests are sent on no other one: kazoo may have
        replaced the connection while the loop was busy, and the new one is not verified yet (docs/protocol.md B29)."""
        self._dropped_logins = 0
        self._zxid_before = 0
        """Last transaction that earlier connections have seen."""
        self.is_trusted = True
        """False if transactions of the present connection do not count for later ones."""
        self.is_refused = False
        """True if its login was refused, after which the client ends."""
        self.resumable: Resumable | None = None
        """The session, once its thread has ended and the session has not."""
        super().__init__(handler=PipeHandler(), **options)
        self._authenticate = self._connection._authenticate_with_sasl
        self._connection._authenticate_with_sasl = self._authenticate_or_fail
        self._invoke = self._connection._invoke
        self._connection._invoke = self._invoke_in_time
        self._connection._expand_client_hosts = self._places

    def _places(self) -> list[tuple[str, str, int]]:
        """Return the servers by name and address in random order. All names are looked up at once; names without an
        address are left out."""
        with ThreadPoolExecutor(max(1, len(self.hosts)), "look up ZooKeeper") as pool:
            looked_up = [(host.strip(), port, pool.submit(_addresses, host.strip())) for host, port in self.hosts]
            found = [(host, place, port) for host, port, places in looked_up for place in places.result()]
        Random().shuffle(found)
        return found

    def _invoke_in_time(self, timeout_s: float, request: Any, xid: int | None = None) -> Any:
        """Send the request that opens a connection. If it is not answered soon, the next server is tried."""
        self._zxid_before, self.is_trusted = self.last_zxid, True
        return self._invoke(min(timeout_s, self._session_timeout / 1000 * ANSWER_SHARE), request, xid)

    def _authenticate_or_fail(self, host: str, timeout_s: float) -> None:
        """Log in. A server that requires a login has its own error for a wrong one, which kazoo does not know."""
        try:
            self._authenticate(host, timeout_s)
        except SessionClosedRequireSaslError as error:
            raise AuthFailedError("wrong login") from error
        except AuthFailedError as error:
            self._dropped_logins += 1
            if isinstance(error.__cause__, ConnectionDropped) and self._dropped_logins < LOGIN_ATTEMPTS:
                raise error.__cause__ from None
            raise
        self._dropped_logins = 0

    def _call(self, request: Any, async_object: Any) -> Any:
        with self._guard:
            if self._state != KeeperState.CONNECTED:
                raise NotSent(f"the connection is {self._state}")
            if self.known_connection != self._connections and request is not _CONNECTION_DROP:
                raise NotSent("the connection is new")
            # A watch that is refused on a working connection would never be armed again: only the next connection
            # rearms watches.
            is_exempt = request is _CONNECTION_DROP or getattr(request, "watcher", None) is not None
            if len(self._queue) >= QUEUED_MAX and not is_exempt:
                raise NotSent(f"{QUEUED_MAX} requests wait already")
            return super()._call(request, async_object)

    def _session_callback(self, state: str) -> None:
        with self._guard:
            before = self._state
            if not self.is_trusted and state in (KeeperState.CONNECTING, KeeperState.CLOSED):
                self.last_zxid, self.is_trusted = self._zxid_before, True
            if state == KeeperState.CLOSED and self._session_id:  # kazoo forgets it now
                self.resumable = Resumable((self._session_id, self._session_passwd), self.last_zxid)
            if state == KeeperState.CONNECTED != before:
                self._connections += 1
            connection = self._connections
            super()._session_callback(state)
        if state != before:
            self._changed(self, state, connection)

    @property
    def is_ended(self) -> bool:
        """True if the client is stopped and not connected. If it still connects, it ends the session at once."""
        return bool(self._stopped.is_set() and self._state != KeeperState.CONNECTED)

    def cut(self) -> None:
        """Shut the connection down below kazoo, so that no heartbeat of its thread arrives. From any thread."""
        sock = self._connection._socket
        if sock is not None:
            with suppress(OSError, AttributeError):
                sock.shutdown(socket.SHUT_RDWR)

    def drop_connection(self) -> None:
        """Break the connection as a network would. Kazoo reconnects by itself."""
        with suppress(NotSent):
            self._call(_CONNECTION_DROP, self.handler.async_result())


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return NAMES.find(host)
    except OSError as error:
        log.warning("ZooKeeper host=%s is left out: %s", host, error)
        return ()


class ZooKeeperSession:
    """One session after another, until closed. All methods are called on the event loop, also `changed`."""

    def __init__(
        self,
        hosts: str,
        timeout_s: float,
        *,
        tls: Tls | None,
        login: MetadataLogin | None,
        liveness: Liveness = UNWATCHED,
        changed: Callable[[SessionState], None],
    ) -> None:
        self.state = SessionState.LOST
        self.id = 0
        """Id of the session; 0 while LOST."""
        self.generation = 0
        """Number of connections so far, of all clients."""
        self.refused = asyncio.Event()
        """Set once ZooKeeper has refused the login."""
        self._login = login
        self._hosts, self._timeout_s, self._tls, self._report = hosts, timeout_s, tls, changed
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._liveness = liveness
        self._given_up: GuardedClient | None = None
        """The last client whose session the watchdog has ended. The watchdog's thread sets it."""
        self.client = self._start()
        self._forget = liveness.add_session(self.give_up)

    def _start(self, resumed: Resumable | None = None) -> GuardedClient:
        """Start a client. Raises OSError, RuntimeError if there are no descriptors or threads for it."""
        options: dict[str, Any] = {} if resumed is None else {"client_id": resumed.id}
        if self._tls is not None:
            ca, cert, key = (path and str(path) for path in (self._tls.ca, self._tls.cert, self._tls.key))
            options |= {"use_ssl": True, "verify_certs": True, "check_hostname": True, "ca": ca}
            options |= {"certfile": cert, "keyfile": key}
        if self._login is not None:
            options |= _login_options(self._login)
        retry = KazooRetry(max_tries=-1, max_jitter=RECONNECT_JITTER, max_delay=RECONNECT_DELAY_MAX_S)
        client = GuardedClient(
            self._on_client_state,
            hosts=self._hosts,
            timeout=self._timeout_s,
            connection_retry=retry,
            logger=_kazoo_log,
            **options,
        )
        if resumed is not None:
            client.last_zxid = resumed.zxid
        try:
            client.start_async()
        except BaseException:
            client.handler.stop()
            raise
        return client

    @property
    def user(self) -> str:
        """Name of the user, for people."""
        return "nobody" if self._login is None else self._login.user

    def break_connection(self, why: str) -> None:
        """Abandon a connection that does not answer. The next one follows by itself."""
        log.warning("metadata connection broken session=%x: %s", self.id, why)
        self.client.drop_connection()

    def trust(self, is_trusted: bool) -> None:
        """Record whether the present connection's transactions count for later connections."""
        self.client.is_trusted = is_trusted

    # docs/protocol.md P45
    def give_up(self) -> bool:
        """End the session because the process does not work. Runs on the watchdog's thread, while the event loop may be
        blocked. Returns True once no heartbeat can follow."""
        client = self.client
        if client is not self._given_up:
            self._given_up = client
            stop = partial(_stop, client)
            threading.Thread(target=stop, name="give up session", daemon=True).start()
        elif not client.is_ended:
            client.cut()
        return client.is_ended

    async def close(self) -> None:
        """End the session. Waits at most CLOSE_TIMEOUT_S for the server's confirmation, because the session expires in
        any case. Without a session there is nothing to wait for."""
        self._is_closing = True
        self._forget()
        had_session = self.id != 0
        self._become(SessionState.LOST, 0)
        done = self._dispose(self.client)
        if had_session:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await done

    def _dispose(self, client: GuardedClient) -> asyncio.Future[None]:
        """Stop a client in its own thread: it blocks until kazoo's threads have ended, however long that takes."""
        done: asyncio.Future[None] = self._loop.create_future()

        def stop() -> None:
            _stop(client)
            self._post(lambda: None if done.done() else done.set_result(None))

        threading.Thread(target=stop, name="stop kazoo", daemon=True).start()
        return done

    def _post(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop; from any thread. Does nothing after the loop's end."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _on_client_state(self, client: GuardedClient, state: str, connection: int) -> None:
        """Pass on a state of kazoo's, on its connection thread, and do nothing else here."""
        identity = client.client_id
        self._post(partial(self._on_state, client, state, identity[0] if identity else 0, connection))

    def _on_state(self, client: GuardedClient, state: str, session: int, connection: int = 0) -> None:
        if self._is_closing or client is not self.client:
            return
        if state == KeeperState.CONNECTED:
            client.known_connection = connection
            self.generation += 1
            if session != self.id:
                self._become(SessionState.LOST, 0)
            self._become(SessionState.CONNECTED, session)
        elif client is self._given_up and state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED):
            self._become(SessionState.LOST, 0)
            self._loop.call_later(RESTART_DELAY_S, self._replace, client)
        elif state in (KeeperState.CONNECTING, KeeperState.CLOSED):
            if self.state is SessionState.CONNECTED:
                self._become(SessionState.SUSPENDED, self.id)
            if state == KeeperState.CLOSED and not client.is_refused:
                log.error("kazoo has ended, starting it again in %g s", RESTART_DELAY_S)
                self._loop.call_later(RESTART_DELAY_S, self._replace, client)
        else:
            log.warning("metadata session lost session=%x: kazoo reports %s", self.id, state)
            self._become(SessionState.LOST, 0)
            if state == KeeperState.AUTH_FAILED:
                client.is_refused = True
                self.refused.set()
                log.error("ZooKeeper refuses the login user=%s, trying again in %g s", self.user, REFUSED_DELAY_S)
                self._loop.call_later(REFUSED_DELAY_S, self._replace, client)

    def _replace(self, client: GuardedClient) -> None:
        """Start the next client; later, if there is no descriptor or thread for it."""
        if self._is_closing or client is not self.client:
            return
        if self._liveness.failure:
            self._loop.call_later(RESTART_DELAY_S, self._replace, client)
            return
        try:
            self.client = self._start(None if client is self._given_up else client.resumable)
            self._dispose(client)
        except (OSError, RuntimeError) as error:
            log.error("cannot start kazoo, trying again in %g s: %s", RESTART_DELAY_S, error)
            self._loop.call_later(RESTART_DELAY_S, self._replace, client)

    def _become(self, state: SessionState, session: int) -> None:
        if (state, session) == (self.state, self.id):
            return
        log.info("metadata session state=%s session=%x", state.name, session or self.id)
        self.state, self.id = state, session
        self._report(state)


def _stop(client: GuardedClient) -> None:
    """Stop a client, which ends its session. Blocks until kazoo's threads have ended. Idempotent."""
    try:
        client.stop()
        client.close()
    except Exception:  # the root of a thread; kazoo may raise anything when it cannot stop
        log.warning("kazoo did not stop cleanly", exc_info=True)


def _login_options(login: MetadataLogin) -> dict[str, Any]:
    """Return the options with which kazoo logs in at the beginning of each connection. Raises ConfigError."""
    options: dict[str, Any] = {}
    if login.acl is Acl.CREATOR:
        options["default_acl"] = CREATOR_ALL_ACL
    if login.mechanism is Mechanism.DIGEST:
        return options | {"auth_data": [("digest", f"{login.user}:{login.secret}")]}
    if find_spec("puresasl") is None:
        raise ConfigError(f'metadata.auth "sasl": pure-sasl is not installed: {install_hint("sasl")}')
    sasl = {"mechanism": "DIGEST-MD5", "username": login.user, "password": login.secret}
    return options | {"sasl_options": sasl}
