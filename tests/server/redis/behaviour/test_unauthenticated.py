"""Connections that must authenticate and have not: they take no slot from users."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvstore.server.access.identities import Access
from kvstore.server.config import Limits
from kvstore.server.redis import listener as resp_listener
from tests.server.access.tables import table
from tests.server.redis.behaviour.test_access import OFF, line_of
from tests.server.redis.pipeline.test_fast_path import is_true, unread
from tests.server.redis.resp_port import Raw, RespPort, redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import PATIENCE_S, wait_until


async def known(stack: AsyncExitStack, resp: RespPort) -> Raw:
    raw = await stack.enter_async_context(resp.raw())
    assert await line_of(raw, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
    return raw


async def unknown(stack: AsyncExitStack, resp: RespPort) -> Raw:
    """Return a connection that sends much and does not authenticate."""
    raw = await stack.enter_async_context(resp.raw())
    assert (await line_of(raw, b"GET", b"t/a")).startswith(b"-NOAUTH ")
    return raw


async def test_unauthenticated_connections_have_half_of_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp_listener, "LOGIN_SURE_S", 0.0)
    limits = Limits(connections_max=8)
    async with redis_port(tmp_path, access=Access(table()), limits=limits) as resp, AsyncExitStack() as stack:
        users = [await known(stack, resp) for _ in range(3)]
        strangers = [await unknown(stack, resp) for _ in range(40)]
        users.append(await known(stack, resp))
        for raw in users:
            assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"
        for raw in strangers[:36]:
            assert await raw.read_to_end() == b""
        found = resp.server.statistics()
        assert found["resp_connections_unknown"] <= 4
        assert found["resp_connections"] <= 8
        assert found["resp_silent_closed_total"] == 37


async def test_connection_of_another_network_keeps_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_listener, "LOGIN_SURE_S", 0.0)
    limits = Limits(connections_max=8)
    async with redis_port(tmp_path, access=Access(table()), limits=limits) as resp, AsyncExitStack() as stack:
        first = await unknown(stack, resp)
        for _ in range(20):
            reader, writer = await asyncio.open_connection(resp.host, resp.port, local_addr=("127.0.1.1", 0))
            stack.callback(writer.close)
            writer.write(packed(b"GET", b"t/a"))
            assert (await reader.readline()).startswith(b"-NOAUTH ")
        assert await line_of(first, b"AUTH", b"tenant", b"secret") == b"+OK\r\n", "the oldest of all"


async def test_peers_of_unknown_networks_close_no_connection_of_a_user(tmp_path: Path) -> None:
    limits = Limits(connections_max=2)
    async with redis_port(tmp_path, access=Access(table()), limits=limits) as resp, AsyncExitStack() as stack:
        users = [await known(stack, resp) for _ in range(2)]
        reader, writer = await asyncio.open_connection(resp.host, resp.port, local_addr=("127.0.1.1", 0))
        stack.callback(writer.close)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).startswith(b"-ERR max number of clients")
        for raw in users:
            assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"


async def test_new_connection_has_time_for_its_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resp_listener, "LOGIN_SURE_S", 1000.0)
    monkeypatch.setattr(resp_listener, "SERVERS_MAX", 0)
    limits = Limits(connections_max=4)
    async with redis_port(tmp_path, access=Access(table()), limits=limits) as resp, AsyncExitStack() as stack:
        first, _ = await unknown(stack, resp), await unknown(stack, resp)
        late = await stack.enter_async_context(resp.raw())
        assert (await late.read_to_end()).startswith(b"-ERR max number of clients")
        assert await line_of(first, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        assert await known(stack, resp), "it has made room"


async def test_unauthenticated_client_may_hold_little_input(tmp_path: Path) -> None:
    """Otherwise unauthenticated peers would use all the memory for commands, and connections of users would be
    closed."""
    value = b"v" * 100_000
    async with redis_port(tmp_path, access=Access(table())) as resp, resp.raw() as user, resp.raw() as stranger:
        assert await line_of(user, b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        for raw in (user, stranger):
            raw.writer.write(packed(b"SET", b"t/a", value)[:-10])
        assert (await stranger.read_to_end()).startswith(b"-NOAUTH Authentication required")
        user.writer.write(packed(b"SET", b"t/a", value)[-10:])
        assert await user.read_line() == b"+OK\r\n"
        assert resp.server.statistics()["resp_input_bytes"] == 0


async def test_large_command_sent_with_a_login_waits_for_it(tmp_path: Path) -> None:
    large = packed(b"SET", b"t/a", b"v" * 100_000)
    async with redis_port(tmp_path, access=Access(table())) as resp, resp.raw() as user, resp.raw() as stranger:
        user.writer.write(packed(b"AUTH", b"tenant", b"secret") + large[:-10])
        assert await user.read_line() == b"+OK\r\n"
        user.writer.write(large[-10:])
        assert await user.read_line() == b"+OK\r\n"
        stranger.writer.write(packed(b"AUTH", b"tenant", b"wrong") + large[:-10])
        assert (await stranger.read_line()).startswith(b"-WRONGPASS ")
        assert (await stranger.read_to_end()).startswith(b"-NOAUTH Authentication required")


async def test_connections_with_pending_logins_give_way_to_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resp_listener, "INPUT_BYTES_MAX", 1_000_000)
    large = packed(b"SET", b"t/a", b"v" * 600_000)
    async with redis_port(tmp_path, access=Access(table())) as resp:
        user, _ = unread(resp)
        user.data_received(packed(b"AUTH", b"tenant", b"secret"))
        await wait_until(lambda: is_true(not user.is_unauthenticated()), what="the user has logged in")
        strangers = [unread(resp)[0] for _ in range(4)]
        for each in strangers:
            each.data_received(packed(b"AUTH", b"tenant", b"wrong") + large[:240_000])
        user.data_received(large[:-10])
        assert not user.pipeline.is_closing
        assert [each.pipeline.is_closing for each in strangers] == [True, True, True, False]
        user.data_received(large[-10:])
        await wait_until(lambda: is_true(user.replies.answered == 2), what="the value is written")


async def test_connection_is_unauthenticated_when_access_control_is_enabled(tmp_path: Path) -> None:
    access = Access(table(*OFF))
    async with redis_port(tmp_path, access=access) as resp, AsyncExitStack() as stack:
        raws = [await stack.enter_async_context(resp.raw()) for _ in range(3)]
        for raw in raws:
            assert await line_of(raw, b"PING") == b"+PONG\r\n"
        assert resp.server.statistics()["resp_connections_unknown"] == 0
        access.take(table())
        assert resp.server.statistics()["resp_connections_unknown"] == 3
        assert await line_of(raws[0], b"AUTH", b"tenant", b"secret") == b"+OK\r\n"
        assert resp.server.statistics()["resp_connections_unknown"] == 2
        access.take(table(*OFF))
        assert resp.server.statistics()["resp_connections_unknown"] == 0
