"""A server that other machines can reach, in a cluster without access control: it serves no client at any endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.access import AccessTable, FoundAdmin, Switch, applied
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.nursery import TaskNursery
from kvstore.errors import AccessUnfounded, InvalidRequest, NotAuthenticated
from kvstore.meta.memory import MemoryStore
from kvstore.meta.tables.access import AccessStore
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc.channels import open_aio_channel
from kvstore.rpc.login import Login
from kvstore.rpc.server import GrpcServer
from kvstore.rpc.status import from_rpc_error
from kvstore.server.access import identities
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.call_gate import CallGate
from kvstore.server.access.http_authenticator import HttpAuthenticator
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from kvstore.server.grpc.access_admin import AccessAdmin
from tests.client.serving import env_of
from tests.server.access.tables import HASH, table
from tests.server.access.test_mutants import WITHIN, let_through
from tests.server.http.requests import request_of
from tests.server.redis.resp_port import redis_port
from tests.server.redis.test_parser import packed
from tests.waiting import PATIENCE_S

COMMAND = "kvstore access found NAME"
TABLES = {"none yet": None, "empty": AccessTable(), "off, with users": table(Switch(False))}


@pytest.fixture(params=sorted(TABLES))
def access(request: pytest.FixtureRequest) -> Access:
    return Access(TABLES[request.param], is_wanted=True)


@pytest.fixture
async def logins(access: Access) -> AsyncIterator[Logins]:
    nursery = TaskNursery("test")
    made = Logins(env_of(nursery), access, AuditLog(lambda: 0.0, lambda: 5, AuditLines()))
    yield made
    made.close()
    await nursery.close()


async def leaks(access: Access) -> int:
    """Return the number of operations of an unauthenticated client that reach the backend."""
    reached, _ = await let_through(access.nobody, access, WITHIN)
    return len(reached)


async def test_unfounded_server_serves_nothing_until_access_is_on(access: Access) -> None:
    assert access.is_on
    assert await leaks(access) == 0
    access.take(applied(AccessTable(), FoundAdmin("root", HASH)))
    assert access.is_on
    assert not access.is_unfounded
    assert await leaks(access) == 0
    root = access.identity_or_none("root")
    assert root is not None
    access.take(table(Switch(False)))
    assert access.is_unfounded
    assert root.is_gone
    assert await leaks(access) == 0


def _take_as_it_is(access: Access, found: AccessTable) -> None:
    """Apply the table alone."""
    access.is_wanted = False
    _take(access, found)


_take = Access.take
BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a table that is off lets everybody in": lambda patch: patch.setattr(Access, "take", _take_as_it_is),
    "before the first table everybody is let in": lambda patch: patch.setattr(
        identities, "NOTHING", identities.EVERYTHING
    ),
}


@pytest.mark.parametrize("name", sorted(BREAKAGES))
async def test_broken_unfounded_check_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKAGES[name](monkeypatch)
    access = Access(is_wanted=True)
    before = await leaks(access)
    access.take(AccessTable())
    assert before + await leaks(access) > 0, name


async def test_unfounded_redis_port_names_the_command_to_run(tmp_path: Path, access: Access) -> None:
    async with redis_port(tmp_path, access=access) as resp, resp.raw() as raw:
        for words in (
            [b"GET", b"a"],
            [b"SET", b"a", b"1"],
            [b"PING"],
            [b"HELLO", b"3"],
            [b"HELLO", b"3", b"AUTH", b"root", b"secret"],
            [b"AUTH", b"root", b"secret"],
        ):
            raw.writer.write(packed(*words))
            answer = (await raw.read_line()).decode()
            assert answer.startswith("-NOAUTH access control is off"), words
            assert COMMAND in answer


async def test_unfounded_grpc_port_refuses_with_a_typed_error(access: Access, logins: Logins) -> None:
    gate = CallGate(access, logins)
    admin: Any = admin_pb2_grpc.AdminServicer()
    server = GrpcServer(
        ("kvstore.v1.Admin",), (lambda each: admin_pb2_grpc.add_AdminServicer_to_server(admin, each),), gate=gate
    )
    port = await server.start("127.0.0.1:0")
    for login in (None, Login("root", b"secret")):
        async with await open_aio_channel(f"127.0.0.1:{port}", None, login) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                await asyncio.wait_for(stub.Access(admin_pb2.AccessRequest()), PATIENCE_S)
        failure = from_rpc_error(raised.value)  # type: ignore[arg-type]
        assert isinstance(failure, NotAuthenticated)
        assert COMMAND in str(failure)
    assert logins.hashes == 0, "nobody's password is worth a hash"
    gate.close()
    await server.stop(0)


async def test_unfounded_http_port_serves_only_health(access: Access, logins: Logins) -> None:
    authenticator = HttpAuthenticator(access, logins)
    for path in ("/", "/metrics"):
        for headers in ({}, {"Authorization": Login("root", b"secret").header}):
            answer = await authenticator.refusal_or_none(request_of("GET", path, headers))
            assert answer is not None
            assert answer.status == 401
            assert COMMAND in answer.body.decode()
    for path in ("/healthz", "/readyz"):
        assert await authenticator.refusal_or_none(request_of("GET", path)) is None


async def test_login_at_unfounded_server_raises_access_unfounded(access: Access, logins: Logins) -> None:
    with pytest.raises(AccessUnfounded, match=COMMAND):
        await logins.login("root", b"secret", "a")


async def test_access_control_cannot_be_disabled_when_it_would_lock_everyone_out() -> None:
    store = MemoryStore()
    await AccessStore(store).change(FoundAdmin("root", HASH))
    off = admin_pb2.ChangeAccessRequest(switch_on=False)
    with pytest.raises(InvalidRequest, match="serve no client"):
        await AccessAdmin(store, Access(is_wanted=True), lambda: 0, lambda: 0).change(off)
    assert (await AccessStore(store).read()).is_on
    await AccessAdmin(store, Access(), lambda: 0, lambda: 0).change(off)
    assert not (await AccessStore(store).read()).is_on
