"""How kazoo's thread ends, and what becomes of the session then. No server."""

from __future__ import annotations

import asyncio
from errno import EMFILE
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kazoo.exceptions import AuthFailedError, ConnectionDropped
from kazoo.handlers import utils
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.states import KeeperState

from kvstore.meta.store import SessionState
from kvstore.meta.zookeeper import session as module
from kvstore.meta.zookeeper.session import (
    LOGIN_ATTEMPTS,
    GuardedClient,
    PipeEnd,
    PipeHandler,
    Resumable,
    ZooKeeperSession,
)
from tests.waiting import wait_until

NOBODY = "127.0.0.1:1"


@pytest.fixture
def client() -> GuardedClient:
    return GuardedClient(lambda *_: None, hosts=NOBODY)


def dropped(*_: object) -> None:
    """Kazoo's behaviour with a server that goes away within a login, and with one that refuses it."""
    raise AuthFailedError("Connection dropped in SASL") from ConnectionDropped("socket connection broken")


def test_server_that_goes_away_within_a_login_has_not_refused_it(client: GuardedClient) -> None:
    """A node ended because its ZooKeeper was restarted while the node logged in."""
    for _ in range(3):
        client._authenticate = dropped
        for _ in range(LOGIN_ATTEMPTS - 1):
            with pytest.raises(ConnectionDropped):
                client._authenticate_or_fail("h", 1.0)
        client._authenticate = lambda *_: None
        client._authenticate_or_fail("h", 1.0)


def test_server_that_drops_each_login_refuses_it(client: GuardedClient) -> None:
    client._authenticate = dropped
    for _ in range(LOGIN_ATTEMPTS - 1):
        with pytest.raises(ConnectionDropped):
            client._authenticate_or_fail("h", 1.0)
    with pytest.raises(AuthFailedError):
        client._authenticate_or_fail("h", 1.0)


def test_client_whose_thread_ends_leaves_its_session_unless_that_is_over(client: GuardedClient) -> None:
    client._session_id, client._session_passwd, client.last_zxid = 7, b"p" * 16, 9
    client._session_callback(KeeperState.CONNECTED)
    client._session_callback(KeeperState.CLOSED)
    assert client.resumable == Resumable((7, b"p" * 16), 9)
    expired = GuardedClient(lambda *_: None, hosts=NOBODY)
    expired._session_id = 7
    for state in (KeeperState.CONNECTED, KeeperState.EXPIRED_SESSION, KeeperState.CONNECTING, KeeperState.CLOSED):
        expired._session_callback(state)
    assert expired.resumable is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_DELAY_S", 0.01)


@pytest.mark.usefixtures("quick")
async def test_next_client_continues_the_session_once_there_is_a_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there was no descriptor for a moment, nobody tried again."""
    make, failures = PipeHandler.create_socket_pair, [OSError(EMFILE, "too many open files")] * 2

    def make_or_fail(handler: PipeHandler) -> tuple[PipeEnd, PipeEnd]:
        if failures:
            raise failures.pop()
        return make(handler)

    session = ZooKeeperSession(NOBODY, 6.0, tls=None, login=None, changed=lambda _: None)
    former = session.client
    former.resumable = Resumable((7, b"p" * 16), 9)
    session._on_state(former, KeeperState.CONNECTED, 7)
    monkeypatch.setattr(PipeHandler, "create_socket_pair", make_or_fail)
    session._on_state(former, KeeperState.CLOSED, 0)
    assert (session.state, session.id) == (SessionState.SUSPENDED, 7)

    async def is_replaced() -> bool:
        return session.client is not former

    await wait_until(is_replaced)
    assert failures == []
    assert (session.client._session_id, session.client._session_passwd, session.client.last_zxid) == (7, b"p" * 16, 9)
    session._on_state(session.client, KeeperState.EXPIRED_SESSION, 0)
    assert (session.state, session.id) == (SessionState.LOST, 0)
    await session.close()


async def test_server_that_answers_no_connection_is_left_before_the_session_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZooKeeper does so while it starts. With one server, each session that met that moment was lost."""
    timeout_s, came, waited_s, invoke = 3.0, list[int](), list[float](), ConnectionHandler._invoke

    def asked(handler: ConnectionHandler, timeout_s: float, *what: Any) -> Any:
        waited_s.append(timeout_s)
        return invoke(handler, timeout_s, *what)

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(1)
        await reader.read()
        writer.close()

    monkeypatch.setattr(ConnectionHandler, "_invoke", asked)
    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        session = ZooKeeperSession(f"{host}:{port}", timeout_s, tls=None, login=None, changed=lambda _: None)

        async def has_come_again() -> bool:
            return len(came) > 1

        await wait_until(has_come_again)
        await session.close()
    assert waited_s[0] + module.RECONNECT_DELAY_MAX_S + module.RECONNECT_JITTER < 0.9 * timeout_s


def test_host_that_is_off_leaves_some_of_the_sessions_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(utils, "create_tcp_connection", lambda *_, timeout, **__: asked.append(timeout))
    GuardedClient(lambda *_: None, hosts=NOBODY, timeout=6.0).handler.create_connection(("h", 1), timeout=6.0)
    assert asked == [2.0]


async def test_next_login_after_a_refused_one_is_delayed() -> None:
    """The thread ends then, too, and that started the next client at once."""
    session = ZooKeeperSession(NOBODY, 6.0, tls=None, login=None, changed=lambda _: None)
    loop, delays = session._loop, list[float]()
    session._loop = cast("Any", SimpleNamespace(call_later=lambda delay_s, *_: delays.append(delay_s)))
    for state in (KeeperState.AUTH_FAILED, KeeperState.CLOSED):
        session._on_state(session.client, state, 0)
    assert (session.refused.is_set(), delays) == (True, [module.REFUSED_DELAY_S])
    session._loop = loop
    await session.close()
