"""Calls of a gRPC server with access control: every admin call by a user without admin rights, and a watch whose
role is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from kvstore.access import AddUser, GrantRole, RemoveUser, RevokeRole, SetPassword, Switch
from kvstore.env.logs.audit_lines import AuditLines
from kvstore.env.nursery import TaskNursery
from kvstore.env.tls import Tls
from kvstore.errors import NotAuthenticated, PermissionDenied
from kvstore.partition.state.commands import Get
from kvstore.proto import admin_pb2, admin_pb2_grpc, feed_pb2, feed_pb2_grpc, kv_pb2, kv_pb2_grpc
from kvstore.rpc.channels import open_aio_channel
from kvstore.rpc.login import Login
from kvstore.rpc.server import GrpcServer
from kvstore.rpc.status import from_rpc_error
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.call_gate import CallGate
from kvstore.server.access.identities import Access
from kvstore.server.access.logins import Logins
from tests.client.serving import env_of
from tests.server.access.tables import OTHER_HASH, table
from tests.waiting import PATIENCE_S

ADMIN_CALLS = [each.name for each in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods]


class Services(kv_pb2_grpc.KVServicer):
    """Answers every call that passes the gate."""

    def __init__(self) -> None:
        self.admin_calls = 0
        self.ended = asyncio.Event()
        self.begun, self.may_answer = asyncio.Event(), asyncio.Event()
        self.is_done = False

    async def Put(self, request: Any, context: Any) -> kv_pb2.PutResponse:  # type: ignore[override]
        """A write is applied once it is submitted, whatever happens to its call."""
        self.is_done = True
        self.begun.set()
        await self.may_answer.wait()
        return kv_pb2.PutResponse(version=7)

    async def Watch(self, request: Any, context: Any) -> None:  # type: ignore[override]
        try:
            await context.write(kv_pb2.WatchResponse())
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, services: Services) -> None:
        self._services = services

    def __getattribute__(self, name: str) -> Any:
        if name not in ADMIN_CALLS:
            return super().__getattribute__(name)

        async def answer(request: Any, context: Any) -> Any:
            self._services.admin_calls += 1
            await context.abort(grpc.StatusCode.ABORTED, "it passed")

        return answer


class World:
    def __init__(self, access: Access, logins: Logins, address: str, services: Services) -> None:
        self.access, self.logins, self.address, self.services = access, logins, address, services

    @asynccontextmanager
    async def channel(self, user: str | None, password: bytes = b"secret") -> AsyncIterator[grpc.aio.Channel]:
        login = Login(user, password) if user is not None else None
        async with await open_aio_channel(self.address, None, login) as opened:
            yield opened


@pytest.fixture
async def world() -> AsyncIterator[World]:
    nursery = TaskNursery("test")
    access, services = Access(table()), Services()
    audit = AuditLog(lambda: 0.0, lambda: 1, AuditLines())
    logins = Logins(env_of(nursery), access, audit)
    gate = CallGate(access, logins)
    server = GrpcServer(
        ("kvstore.v1.KV", "kvstore.v1.Admin", "kvstore.v1.Feed"),
        (
            lambda each: kv_pb2_grpc.add_KVServicer_to_server(services, each),
            lambda each: admin_pb2_grpc.add_AdminServicer_to_server(Admin(services), each),
            lambda each: feed_pb2_grpc.add_FeedServicer_to_server(Changes(services), each),
        ),
        gate=gate,
    )
    port = await server.start("127.0.0.1:0")
    yield World(access, logins, f"127.0.0.1:{port}", services)
    gate.close()
    await server.stop(0)
    logins.close()
    await nursery.close()


class Changes(feed_pb2_grpc.FeedServicer):
    """Waits for news that never arrive."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def Changes(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self._services.begun.set()
        await asyncio.Event().wait()


async def failure_of(call: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.wait_for(call, PATIENCE_S)
    return from_rpc_error(raised.value)  # type: ignore[arg-type]


def request_of(method: str) -> Any:
    return getattr(admin_pb2, f"{method}Request")()


@pytest.mark.parametrize("user", ["tenant", "reader", "backup", "nothing"])
async def test_admin_calls_are_refused_for_users_without_admin_right(world: World, user: str) -> None:
    async with world.channel(user) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        for method in ADMIN_CALLS:
            failure = await failure_of(getattr(stub, method)(request_of(method)))
            assert isinstance(failure, PermissionDenied), method
            assert f"user {user} lacks the right admin" in str(failure)
    assert world.services.admin_calls == 0


@pytest.mark.parametrize(
    ("user", "password"), [(None, b""), ("root", b"wrong"), ("nobody", b"secret"), ("certified", b"")]
)
async def test_calls_are_refused_without_authentication(world: World, user: str | None, password: bytes) -> None:
    async with world.channel(user, password) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        for method in ADMIN_CALLS:
            assert isinstance(await failure_of(getattr(stub, method)(request_of(method))), NotAuthenticated)
    assert world.services.admin_calls == 0


async def test_administrator_may_make_every_admin_call(world: World) -> None:
    async with world.channel("root") as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        for method in ADMIN_CALLS:
            await failure_of(getattr(stub, method)(request_of(method)))
    assert world.services.admin_calls == len(ADMIN_CALLS)


@pytest.mark.parametrize(
    ("change", "kind"), [(RevokeRole("tenant", "owns"), PermissionDenied), (RemoveUser("tenant"), NotAuthenticated)]
)
async def test_watch_ends_when_its_right_is_revoked(world: World, change: Any, kind: type[Exception]) -> None:
    async with world.channel("tenant") as channel, world.channel("reader") as other:
        stub, stays = kv_pb2_grpc.KVStub(channel), kv_pb2_grpc.KVStub(other)
        call: Any = stub.Watch(kv_pb2.WatchRequest(start=b"t/", end=b"t0"))
        staying: Any = stays.Watch(kv_pb2.WatchRequest())
        assert await call.read() == kv_pb2.WatchResponse()
        assert await staying.read() == kv_pb2.WatchResponse()
        world.access.take(table(change))
        assert isinstance(await failure_of(call.read()), kind)
        await asyncio.wait_for(world.services.ended.wait(), PATIENCE_S)
        assert not staying.done()


@pytest.mark.parametrize("change", [RemoveUser("tenant"), SetPassword("tenant", OTHER_HASH)])
async def test_started_write_is_answered_when_its_user_is_removed(world: World, change: Any) -> None:
    """NotAuthenticated would mean that nothing was done, so a client that logs in again would repeat the write."""
    async with world.channel("tenant") as channel:
        call: Any = kv_pb2_grpc.KVStub(channel).Put(kv_pb2.PutRequest(key=b"t/k", value=b"v"))
        await asyncio.wait_for(world.services.begun.wait(), PATIENCE_S)
        world.access.take(table(change))
        world.services.may_answer.set()
        assert (await asyncio.wait_for(call, PATIENCE_S)).version == 7
        assert world.services.is_done
        later: Any = kv_pb2_grpc.KVStub(channel).Put(kv_pb2.PutRequest(key=b"t/k", value=b"v"))
        assert isinstance(await failure_of(later), NotAuthenticated)


async def test_changes_call_ends_when_its_right_is_revoked(world: World) -> None:
    async with world.channel("tenant") as channel:
        call: Any = feed_pb2_grpc.FeedStub(channel).Changes(feed_pb2.ChangesRequest(start=b"t/", end=b"t0"))
        await asyncio.wait_for(world.services.begun.wait(), PATIENCE_S)
        world.access.take(table(RevokeRole("tenant", "owns")))
        assert isinstance(await failure_of(call), PermissionDenied)


async def test_unauthenticated_watch_ends_when_access_control_is_enabled(world: World) -> None:
    world.access.take(table(Switch(False)))
    async with world.channel(None) as channel:
        call: Any = kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest())
        assert await call.read() == kv_pb2.WatchResponse()
        world.access.take(table())
        assert isinstance(await failure_of(call.read()), NotAuthenticated)


class Aborted(Exception):
    pass


class Head:
    """The context of a call whose metadata is in flight until `is_sent` is set. gRPC ends no call before that."""

    def __init__(self) -> None:
        self.is_sent, self.begun = asyncio.Event(), asyncio.Event()
        self.was_whole_at_abort: bool | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def send_initial_metadata(self, _: Any) -> None:
        self.begun.set()
        await self.is_sent.wait()

    async def abort(self, *_: Any, **_options: Any) -> None:
        self.was_whole_at_abort = self.is_sent.is_set()
        raise Aborted


async def test_call_is_ended_after_its_metadata_when_the_right_is_revoked(world: World) -> None:
    world.access.take(table(Switch(False)))
    gate = CallGate(world.access, world.logins)
    context = Head()

    async def call() -> None:
        async with gate.passage("/kvstore.v1.KV/Session", None, context, lasts=True):
            pytest.fail("it has passed")

    calling = asyncio.create_task(call())
    await context.begun.wait()
    world.access.take(table())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not calling.done()
    context.is_sent.set()
    with pytest.raises(Aborted):
        await asyncio.wait_for(calling, PATIENCE_S)
    assert context.was_whole_at_abort
    gate.close()


@pytest.mark.parametrize("change", [RemoveUser("tenant"), SetPassword("tenant", OTHER_HASH)])
async def test_user_removed_while_access_was_off_is_unknown_when_it_is_on(world: World, change: Any) -> None:
    """The user's calls began while access control was off. They must not continue with the permissions of everyone."""
    async with world.channel("tenant") as channel:
        call: Any = kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest(start=b"t/", end=b"t0"))
        assert await call.read() == kv_pb2.WatchResponse()
        identity = world.access.identity_or_none("tenant")
        assert identity is not None
        world.access.take(table(Switch(False)))
        world.access.take(table(Switch(False), change))
        world.access.take(table(change))
        assert isinstance(identity.refusal_or_none(Get(b"other", 0, 0)), NotAuthenticated)
        assert isinstance(await failure_of(call.read()), NotAuthenticated)


async def test_call_is_identified_by_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()

    def issued(host: str, name: str) -> Tls:
        ca, cert, key = (tmp_path / f"{name}.{kind}" for kind in ("ca", "pem", "key"))
        made = authority.issue_cert(host, common_name=name)
        authority.cert_pem.write_to_path(str(ca))
        made.cert_chain_pems[0].write_to_path(str(cert))
        made.private_key_pem.write_to_path(str(key))
        return Tls(ca=ca, cert=cert, key=key)

    nursery = TaskNursery("test")
    access = Access(table(AddUser("application"), GrantRole("application", "reads")))
    logins = Logins(env_of(nursery), access, AuditLog(lambda: 0.0, lambda: 1, AuditLines()))
    services = Services()
    server = GrpcServer(
        ("kvstore.v1.KV", "kvstore.v1.Admin"),
        (
            lambda each: kv_pb2_grpc.add_KVServicer_to_server(services, each),
            lambda each: admin_pb2_grpc.add_AdminServicer_to_server(Admin(services), each),
        ),
        gate=CallGate(access, logins),
    )
    port = await server.start("127.0.0.1:0", replace(issued("127.0.0.1", "n1"), verify_clients=True))
    async with await open_aio_channel(f"127.0.0.1:{port}", issued("a.example", "application")) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        failure = await failure_of(stub.Status(admin_pb2.StatusRequest()))
        assert "user application lacks the right admin" in str(failure)
        call: Any = kv_pb2_grpc.KVStub(channel).Watch(kv_pb2.WatchRequest())
        assert await call.read() == kv_pb2.WatchResponse()
        call.cancel()
    async with await open_aio_channel(f"127.0.0.1:{port}", issued("b.example", "stranger")) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        assert isinstance(await failure_of(stub.Status(admin_pb2.StatusRequest())), NotAuthenticated)
    await server.stop(0)
    logins.close()
    await nursery.close()
