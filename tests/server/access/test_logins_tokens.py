"""Tokens at a server: the user they authenticate, the endpoints that accept them, and their expiry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.access import (
    AccessTable,
    AddToken,
    Change,
    RemoveToken,
    RemoveUser,
    RevokeRole,
    Right,
    SetPassword,
    Switch,
)
from kvstore.access.tokens import hash_of, made
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.nursery import TaskNursery
from kvstore.errors import MetadataUnavailable, NotAuthenticated
from kvstore.meta import paths
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Stat, Watch
from kvstore.meta.tables.access import AccessStore
from kvstore.partition.state import commands
from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.login import Login
from kvstore.rpc.status import from_rpc_error
from kvstore.server import table_follower
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.follow import AccessFollower
from kvstore.server.access.guard import Guard
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import FAILURES_MAX, Logins
from tests.audited import KeptLines
from tests.client.serving import env_of
from tests.server.access.tables import CHANGES, OTHER_HASH, PASSWORD, table
from tests.server.access.test_call_gate import World, world
from tests.server.access.test_mutants import Backend
from tests.server.http.requests import request_of
from tests.server.redis.behaviour.test_access import line_of
from tests.server.redis.resp_port import redis_port
from tests.waiting import wait_until

__all__ = ["world"]

WORD, FALSE = made(b"\x01" * 6, b"\x02" * 32), made(b"\x01" * 6, b"\x03" * 32)
ID, NOW_MS, TTL_MS = "01" * 6, 1_000_000, 60_000


def add(now_ms: int = NOW_MS, ttl_ms: int = TTL_MS) -> AddToken:
    return AddToken(ID, "tenant", hash_of(WORD), ttl_ms, now_ms, now_ms)


@dataclass
class Dated:
    """A clock that does not move by itself."""

    ms: int = NOW_MS

    def now(self) -> float:
        return self.ms / 1000

    def date_ms(self) -> int:
        return self.ms


@dataclass
class Server:
    """A server's users and logins."""

    access: Access
    logins: Logins
    clock: Dated = field(default_factory=Dated)
    audit: KeptLines = field(default_factory=KeptLines)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    nursery, clock = TaskNursery("test"), Dated()
    lines = KeptLines()
    audit = AuditLog(clock.now, clock.date_ms, lines)
    access = Access(table(add()), audit)
    env: Any = env_of(nursery)
    logins = Logins(env, access, audit)
    logins._clock = clock  # type: ignore[assignment]
    yield Server(access, logins, clock, lines)
    logins.close()
    await nursery.close()


@pytest.mark.parametrize("user", ["tenant", "", "default"])
async def test_token_is_accepted_with_its_user_or_none_without_a_slow_hash(server: Server, user: str) -> None:
    identity = await server.logins.login(user, WORD, "a")
    assert (identity.name, identity.who) == ("tenant", f"tenant#{ID}")
    identity.check(Right.READ, b"t/", b"t0", "a test")
    assert server.logins.hashes == 0
    assert (await server.logins.login("tenant", PASSWORD, "a")).who == "tenant"


@pytest.mark.parametrize(("user", "word"), [("", FALSE), ("tenant", FALSE), ("root", WORD), ("nobody", WORD)])
async def test_wrong_token_is_refused_and_audited_without_its_secret(server: Server, user: str, word: bytes) -> None:
    with pytest.raises(NotAuthenticated) as failed:
        await server.logins.login(user, word, "a")
    (line,) = server.audit.documents()
    assert (line["who"], line["outcome"]) == (f"'#{ID}'", "NOT_AUTHENTICATED")
    assert word.decode()[-64:] not in "".join(server.audit.lines) + str(failed.value)


async def test_token_is_accepted_despite_failures_of_its_address(server: Server) -> None:
    for number in range(FAILURES_MAX + 1):
        with pytest.raises(NotAuthenticated):
            await server.logins.login("tenant", b"%d" % number, "a")
    with pytest.raises(NotAuthenticated, match="too many"):
        await server.logins.login("tenant", b"one more", "a")
    assert (await server.logins.login("", WORD, "a")).name == "tenant"


async def test_token_and_its_connections_end_when_it_expires(server: Server) -> None:
    identity, told = await server.logins.login("", WORD, "a"), list[bool]()
    server.access.on_change(lambda: told.append(identity.is_gone))
    assert server.access.next_expiry_ms() == NOW_MS + TTL_MS
    server.clock.ms = NOW_MS + TTL_MS - 1
    server.access.expire(server.clock.ms)
    assert (identity.is_gone, told) == (False, [])
    server.clock.ms += 1
    with pytest.raises(NotAuthenticated, match="has expired"):  # also before the expiry has been noticed
        await server.logins.login("", WORD, "a")
    server.access.expire(server.clock.ms)
    assert (identity.is_gone, told) == (True, [True])
    assert server.access.next_expiry_ms() is None
    with pytest.raises(NotAuthenticated, match="revoked or has expired"):
        identity.check_known()
    server.access.take(table(add()))
    with pytest.raises(NotAuthenticated):
        await server.logins.login("", WORD, "a")
    assert identity.is_gone, "for good"


async def test_token_ended_by_a_wrong_date_works_when_the_date_is_corrected(server: Server) -> None:
    """The token was refused until somebody changed a user: a machine may start with a clock that is a day ahead."""
    former, told = await server.logins.login("", WORD, "a"), list[bool]()
    server.access.on_change(lambda: told.append(True))
    server.access.expire(NOW_MS + TTL_MS)
    assert (former.is_gone, server.access.next_expiry_ms(), told) == (True, None, [True])
    with pytest.raises(NotAuthenticated):
        await server.logins.login("", FALSE, "a")
    identity = await server.logins.login("", WORD, "a")
    identity.check(Right.READ, b"t/", b"t0", "a test")
    assert identity.who == f"tenant#{ID}"
    assert former.is_gone, "for good"
    assert (server.access.next_expiry_ms(), len(told)) == (NOW_MS + TTL_MS, 2), "its end is followed"
    assert await server.logins.login("", WORD, "a") is identity
    server.access.expire(NOW_MS + TTL_MS)
    assert identity.is_gone


@pytest.mark.parametrize("change", [RemoveToken(ID), RemoveUser("tenant"), SetPassword("tenant", OTHER_HASH)])
async def test_connections_of_a_token_end_when_it_or_its_user_is_removed(server: Server, change: Change) -> None:
    identity = await server.logins.login("", WORD, "a")
    server.access.take(table(add(), change))
    assert identity.is_gone
    with pytest.raises(NotAuthenticated):
        await server.logins.login("", WORD, "a")


async def test_token_survives_other_changes_and_follows_its_users_rights(server: Server) -> None:
    identity, own = await server.logins.login("", WORD, "a"), await server.logins.login("tenant", PASSWORD, "a")
    server.access.take(table(add(), RevokeRole("tenant", "owns")))
    assert not identity.is_gone
    assert not identity.permissions.may(Right.READ, b"t/a")
    server.access.take(table(add()))
    assert identity.permissions.may(Right.READ, b"t/a")
    server.access.take(table())
    assert (identity.is_gone, own.is_gone) == (True, False), "only what came with the token"


async def test_audit_line_of_a_refusal_names_the_token(server: Server) -> None:
    class Sink:
        def complete(self, token: int, result: object) -> None: ...
        def flush(self) -> None: ...

    backend: Any = Backend()
    guard = Guard(server.access, await server.logins.login("", WORD, "a"), backend, "10.0.0.7:1")
    guard.submit((commands.Get(b"x"),), Sink(), (1,))
    assert server.audit.documents()[-1]["who"] == f"tenant#{ID}"


async def test_http_request_accepts_bearer_token(server: Server) -> None:
    authenticator = HttpAuthenticator(server.access, server.logins)
    for header, status in ((Login("", WORD).header, 200), (Login("", FALSE).header, 401), ("Bearer x", 401)):
        answer = await authenticator.refusal_or_none(request_of("GET", "/metrics", {"Authorization": header}))
        assert (200 if answer is None else answer.status) == status, header
    assert Login("", WORD).header == f"Bearer {WORD.decode()}"
    assert WORD.decode() not in repr(Login("", WORD))


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/keys"])
async def test_page_opened_before_a_browser_login_has_no_audit_line(server: Server, path: str) -> None:
    authenticator = HttpAuthenticator(server.access, server.logins)
    answer = await authenticator.refusal_or_none(request_of("GET", path))
    assert answer is not None
    assert (answer.status, "WWW-Authenticate" in answer.headers) == (401, True)
    assert (server.audit.documents(), server.access.denied) == ([], 0)
    wrong = {"Authorization": Login("", FALSE).header}
    for method, target, headers in (("GET", path, wrong), ("POST", path, {}), ("GET", "/metrics", {})):
        before = len(server.audit.documents())
        await authenticator.refusal_or_none(request_of(method, target, headers))
        assert len(server.audit.documents()) > before


async def test_call_accepts_bearer_token_and_ends_when_it_expires(world: World) -> None:
    world.access.take(table(add(now_ms=world.logins._clock.date_ms())))
    async with world.channel("", FALSE) as channel:
        with pytest.raises(Exception, match="token is unknown") as failed:
            await kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest(start=b"t/", end=b"t0")).read()
        assert isinstance(from_rpc_error(failed.value), NotAuthenticated)  # type: ignore[arg-type]
    async with world.channel("", WORD) as channel:
        watch = kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest(start=b"t/", end=b"t0"))
        assert await watch.read() == kv_pb2.WatchResponse()
        world.access.take(table(add(), RemoveToken(ID)))
        with pytest.raises(Exception, match="was revoked"):
            await watch.read()
        await world.services.ended.wait()


@pytest.mark.parametrize("words", [(b"tenant", WORD), (b"default", WORD), (WORD,)])
async def test_redis_login_accepts_token_as_password(tmp_path: Path, words: tuple[bytes, ...]) -> None:
    access = Access()
    async with redis_port(tmp_path, access=access) as resp:
        access.take(table(add(now_ms=resp.server.now_ms())))
        async with resp.raw() as raw:
            assert await line_of(raw, b"AUTH", *words) == b"+OK\r\n"
            assert await raw.ask(b"ACL WHOAMI\r\n", b"$6\r\ntenant\r\n") == b"$6\r\ntenant\r\n"
            assert await line_of(raw, b"SET", b"t/a", b"1") == b"+OK\r\n"
            assert (await line_of(raw, b"SET", b"x", b"1")).startswith(b"-NOPERM ")
            access.take(table())
            assert (await raw.read_to_end()).startswith(b"-NOAUTH ")


async def test_follower_ends_expired_tokens_by_itself() -> None:
    """Also while nothing changes in the metadata store."""
    nursery, store, clock = TaskNursery("test"), MemoryStore(), Dated(NOW_MS + TTL_MS - 1)
    env: Any = replace(env_of(nursery), clock=clock)  # type: ignore[arg-type]
    for change in (*CHANGES, add()):
        await AccessStore(store).change(change)
    access = Access()
    follower = AccessFollower(env, store, access)
    await follower.open()
    identity = await Logins(env, access, AuditLog(clock.now, clock.date_ms, AuditLines())).login("", WORD, "a")

    assert not identity.is_gone
    clock.ms += 1
    await wait_until(async_of(lambda: identity.is_gone), what="it has expired")
    await AccessStore(store).change(RemoveToken(ID))
    await wait_until(async_of(lambda: access.statistics()["access_tokens"] == 0), what="changes are followed as before")
    await follower.close()
    await nursery.close()


@pytest.mark.parametrize("is_silent", [True, False])
async def test_token_expires_while_the_metadata_store_is_unavailable(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store was unavailable, connections of the token stayed open."""

    class Store(MemoryStore):
        is_away, failed = False, 0

        async def get(self, path: str) -> tuple[bytes, Stat]:
            if self.is_away:
                self.failed += 1
                if is_silent:
                    await asyncio.Event().wait()
                raise MetadataUnavailable(path)
            return await super().get(path)

    monkeypatch.setattr(table_follower, "REREAD_S", 0.01)
    monkeypatch.setattr(table_follower, "RETRY_S", 0.01)
    nursery, store, clock = TaskNursery("test"), Store(), Dated(NOW_MS)
    env: Any = replace(env_of(nursery), clock=clock)  # type: ignore[arg-type]
    for change in (*CHANGES, add(ttl_ms=1_000)):
        await AccessStore(store).change(change)
    access = Access()
    follower = AccessFollower(env, store, access)
    await follower.open()
    identity = await Logins(env, access, AuditLog(clock.now, clock.date_ms, AuditLines())).login("", WORD, "a")
    store.is_away = True
    follower.reread()
    await wait_until(async_of(lambda: store.failed > (0 if is_silent else 3)), what="the store is away")
    assert not identity.is_gone
    clock.ms += 1_000
    await wait_until(async_of(lambda: identity.is_gone), what="it has expired")
    await follower.close()
    await nursery.close()


@pytest.mark.parametrize("reread_s", [0.0, 0.01])
async def test_revoked_right_is_gone_when_the_table_watch_was_lost(
    reread_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is read at the end of a wait although the clock may show that a little of it is left. Otherwise a
    remainder below the clock's resolution would be waited for without end."""

    class Deaf(MemoryStore):
        def watch(self, path: str, changed: Callable[[], None]) -> Watch:
            return super().watch(path, lambda: None)

    monkeypatch.setattr(table_follower, "REREAD_S", reread_s)
    nursery, store, clock = TaskNursery("test"), Deaf(), Dated(NOW_MS)
    env: Any = replace(env_of(nursery), clock=clock)  # type: ignore[arg-type]
    for change in (*CHANGES, add()):
        await AccessStore(store).change(change)
    access = Access()
    follower = AccessFollower(env, store, access)
    taken: list[AccessTable] = []
    monkeypatch.setattr(access, "take", lambda table: (taken.append(table), Access.take(access, table)))
    await follower.open()
    assert access.statistics()["access_tokens"] == 1
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(taken) == 1, "what is as it was is taken again"
    await AccessStore(store).change(RemoveToken(ID))
    await wait_until(async_of(lambda: access.statistics()["access_tokens"] == 0), what="the table is read again")
    await follower.close()
    await nursery.close()


@pytest.mark.parametrize("is_hinted", [True, False])
async def test_lost_table_does_not_disable_access_control(is_hinted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(MemoryStore):
        def watch(self, path: str, changed: Callable[[], None]) -> Watch:
            return super().watch(path, changed if is_hinted else lambda: None)

    monkeypatch.setattr(table_follower, "REREAD_S", 10.0 if is_hinted else 0.0)
    nursery, store, clock = TaskNursery("test"), Store(), Dated(NOW_MS)
    env: Any = replace(env_of(nursery), clock=clock)  # type: ignore[arg-type]
    for change in (*CHANGES, add()):
        await AccessStore(store).change(change)
    access = Access()
    follower = AccessFollower(env, store, access)
    await follower.open()
    assert access.is_on
    await store.delete(paths.ACCESS, -1)
    await wait_until(async_of(lambda: access.identity_or_none("root") is None), what="the loss is noticed")
    for _ in range(50):
        await asyncio.sleep(0)
        assert access.is_on
    with pytest.raises(NotAuthenticated):
        access.nobody.check_known()
    for change in (*CHANGES, Switch(False)):
        await AccessStore(store).change(change)
    await wait_until(async_of(lambda: not access.is_on), what="somebody has switched it off")
    await follower.close()
    await nursery.close()


def async_of(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return condition()

    return ask
