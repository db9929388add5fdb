"""Every call of the admin service leaves a line with the caller, the address, the call and the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import grpc
import pytest

from kvstore.env import Env
from kvstore.env.nursery import TaskNursery
from kvstore.errors import InvalidRequest, OutcomeUnknown
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.server.access import audit, changes
from kvstore.server.access.audit import AuditLog
from kvstore.server.access.changes import AdminChanges
from kvstore.server.grpc.audit import ARGUMENTS_MAX, Audited, AuditedCalls, arguments_of, is_change, who
from tests.audited import KeptLines
from tests.client.serving import ModelClock
from tests.waiting import PATIENCE_S, wait_until


class Answers(admin_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.has_changed = False

    async def Status(self, request: Any, context: Any) -> Any:
        return admin_pb2.StatusResponse(server="n1")

    async def ChangeRing(self, request: Any, context: Any) -> Any:
        raise InvalidRequest("no")

    async def ChangeAccess(self, request: Any, context: Any) -> Any:
        self.began.set()
        await self.may_end.wait()
        self.has_changed = True
        return admin_pb2.AccessResponse()

    async def Undrain(self, request: Any, context: Any) -> Any:
        raise OutcomeUnknown("the connection was lost")


class Served:
    """The admin service of a node, its audit lines and a client."""

    def __init__(self) -> None:
        self.answers, self.kept, self.nursery = Answers(), KeptLines(), TaskNursery("audited")
        audit = AuditLog(lambda: 5.0, lambda: 7, self.kept)
        nothing: Any = None
        env = Env(ModelClock(), Random(1), nothing, nothing, self.nursery, nothing)
        self.changes = AdminChanges(env, audit)
        self.calls = AuditedCalls(lambda: 5.0, audit, self.changes, str)
        self._audited = lambda server: cast(grpc.aio.Server, Audited(server, lambda: 5.0, audit, self.changes))
        self.stub: Any

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Served]:
        register = [lambda each: admin_pb2_grpc.add_AdminServicer_to_server(self.answers, self._audited(each))]
        server = GrpcServer(("kvstore.v1.Admin",), register)
        port = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            self.stub = admin_pb2_grpc.AdminStub(channel)
            yield self
        await server.stop(0)
        await self.nursery.close()

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """Return the lines once there are `count` of them: a call leaves its last line after its caller has the
        answer."""

        async def are_there() -> bool:
            return len(self.kept.lines) >= count

        await wait_until(are_there, what=f"{count} audit lines")
        found = self.kept.documents()
        assert len(found) == count
        return found


async def test_audit_has_a_line_for_each_call_with_arguments_and_outcome() -> None:
    async with Served().open() as served:
        await served.stub.Status(admin_pb2.StatusRequest())
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await served.stub.ChangeRing(admin_pb2.ChangeRingRequest(action="ADD", partitions=["p\n9"]))
        assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        first, begun, ended = await served.lines(3)
    assert first.pop("from").startswith("127.0.0.1:")
    assert first == {"time": 7, "who": "-", "call": "Status", "outcome": "OK", "took_ms": 0}
    assert begun["arguments"] == ended["arguments"] == 'action: ADD partitions: "p\\n9"'
    assert (begun["call"], begun["outcome"], begun["change"]) == ("ChangeRing", "BEGUN", 1)
    assert (ended["outcome"], ended["why"], ended["change"]) == ("INVALID_REQUEST", "no", 1)


async def test_change_is_recorded_and_made_when_its_call_is_cancelled() -> None:
    async with Served().open() as served:
        call = served.stub.ChangeAccess(admin_pb2.ChangeAccessRequest(remove_user="anna"))
        await asyncio.wait_for(served.answers.began.wait(), PATIENCE_S)
        (begun,) = await served.lines(1)
        assert begun["outcome"] == "BEGUN", "recorded before it is attempted"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await served.stub.Status(admin_pb2.StatusRequest())  # the server has seen the cancellation by now
        served.answers.may_end.set()
        lines = await served.lines(3)
    assert served.answers.has_changed
    assert [(each["call"], each["outcome"]) for each in lines[1:]] == [("Status", "OK"), ("ChangeAccess", "OK")]


async def test_change_is_refused_when_it_cannot_be_recorded() -> None:
    async with Served().open() as served:
        served.answers.may_end.set()
        served.kept.fault = "the disk is full"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await served.stub.ChangeAccess(admin_pb2.ChangeAccessRequest(remove_user="anna"))
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        (line,) = await served.lines(1)
    assert not served.answers.has_changed
    assert line["outcome"] == "UNAVAILABLE"


async def test_change_with_an_unknown_outcome_is_recorded_as_unknown() -> None:
    async with Served().open() as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.Undrain(admin_pb2.UndrainRequest())
        _, ended = await served.lines(2)
    assert ended["outcome"] == "OUTCOME_UNKNOWN"


async def test_change_is_recorded_as_unknown_when_the_node_stops_meanwhile() -> None:
    async with Served().open() as served:
        call = served.stub.ChangeAccess(admin_pb2.ChangeAccessRequest(remove_user="anna"))
        await asyncio.wait_for(served.answers.began.wait(), PATIENCE_S)
        await served.nursery.close()
        _, ended = await served.lines(2)
        call.cancel()
    assert (ended["outcome"], ended["why"]) == ("OUTCOME_UNKNOWN", "the node stopped")


async def test_changes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CHANGES_MAX", 1)
    async with Served().open() as served:
        call = served.stub.ChangeAccess(admin_pb2.ChangeAccessRequest(remove_user="anna"))
        await asyncio.wait_for(served.answers.began.wait(), PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await served.stub.Undrain(admin_pb2.UndrainRequest())
        assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        served.answers.may_end.set()
        await call
        with pytest.raises(grpc.aio.AioRpcError, match="the connection was lost"):
            await served.stub.Undrain(admin_pb2.UndrainRequest())


def test_every_admin_method_that_is_not_a_read_is_a_change() -> None:
    methods = {each.name: each.input_type.name for each in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods}
    changing = {name for name, request in methods.items() if is_change(name, getattr(admin_pb2, request)())}
    assert changing == {"Drain", "Undrain", "ChangeAccess", "ChangeNamespaces", "ChangeReplicas", "AbandonTransactions"}
    assert is_change("LogLevel", admin_pb2.LogLevelRequest(logger="kvstore", level="WARNING"))
    assert is_change("ChangeRing", admin_pb2.ChangeRingRequest(action="PAUSE"))
    assert not is_change("ChangeRing", admin_pb2.ChangeRingRequest(action="ADD", dry_run=True))


class Context:
    def __init__(self, identity: dict[str, list[bytes]]) -> None:
        self._identity = identity

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._identity


def test_caller_is_named_by_its_certificate() -> None:
    assert who(Context({})) == "-"
    assert who(Context({"x509_common_name": [b"ops\n7"]})) == "'ops\\n7'"
    assert who(Context({"x509_subject_alternative_name": [b"n1", b"10.0.0.1"]})) == "'n1','10.0.0.1'"


def test_long_arguments_are_truncated() -> None:
    assert len(arguments_of(admin_pb2.LedgersRequest(partition="p" * 9_000))) == ARGUMENTS_MAX + 1


def test_arguments_of_megabytes_are_not_written() -> None:
    """A request of 3 MB held the event loop for a second, to keep 500 characters of it."""
    asked = admin_pb2.ChangeRingRequest(action="ADD", partitions=["p"] * 1_000_000)
    assert arguments_of(asked) == "… 3000002 bytes"


class Called(Context):
    """A call context with an address."""

    def __init__(self, address: str) -> None:
        super().__init__({})
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:1"


async def test_flood_of_one_address_is_limited_except_for_its_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "LINES_MAX", 3)
    served, now = Served(), 0.0
    log = served.changes._audit
    monkeypatch.setattr(log, "_now", lambda: now)

    async def answered(request: Any, context: Any) -> Any:
        return request

    read, drain = served.calls.audited("Status", answered), served.calls.audited("Drain", answered)
    for _ in range(10):
        await read(admin_pb2.StatusRequest(), Called("10.0.0.7"))
    await drain(admin_pb2.DrainRequest(), Called("10.0.0.7"))
    await read(admin_pb2.StatusRequest(), Called("10.0.0.8"))
    now = audit.LINES_S
    await read(admin_pb2.StatusRequest(), Called("10.0.0.7"))
    await served.nursery.close()
    shown = [(each["from"], each.get("call", each.get("lines_left_out"))) for each in served.kept.documents()]
    assert shown == [
        *[("10.0.0.7:1", "Status")] * 3,
        *[("10.0.0.7:1", "Drain")] * 2,
        ("10.0.0.8:1", "Status"),
        ("10.0.0.7", 7),
        ("10.0.0.7:1", "Status"),
    ]


def test_password_hash_is_not_written() -> None:
    for name in ("add_user", "set_password"):
        asked = admin_pb2.ChangeAccessRequest(**{name: {"name": "anna", "password_hash": "scrypt$secret"}})
        assert arguments_of(asked) == f'{name} {{ name: "anna" }}'
        assert getattr(asked, name).password_hash == "scrypt$secret"
