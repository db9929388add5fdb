"""Each call of the admin service leaves a line that says who, from where, what and with which result."""

from __future__ import annotations

import logging
from typing import Any, cast

import grpc
import orjson
import pytest

from kvstore.errors import InvalidRequest
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.rpc.status import abort
from kvstore.server.access import audit
from kvstore.server.access.audit import AuditLog
from kvstore.server.grpc.audit import ARGUMENTS_MAX, Audited, _Handlers, arguments_of, who
from tests.waiting import wait_until


class Answers(admin_pb2_grpc.AdminServicer):
    async def Status(self, request: Any, context: Any) -> Any:
        return admin_pb2.StatusResponse(server="n1")

    async def ChangeRing(self, request: Any, context: Any) -> Any:
        await abort(context, InvalidRequest("no"))


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvstore.audit"]


async def has_lines(caplog: pytest.LogCaptureFixture, count: int) -> bool:
    return len(lines_of(caplog)) >= count


async def test_a_line_for_each_call_with_its_arguments_and_result(caplog: pytest.LogCaptureFixture) -> None:
    server = GrpcServer(
        ("kvstore.v1.Admin",),
        (
            lambda each: admin_pb2_grpc.add_AdminServicer_to_server(
                Answers(), cast(grpc.aio.Server, Audited(each, lambda: 5.0, AuditLog(lambda: 5.0, lambda: 7), str))
            ),
        ),
    )
    port = await server.start("127.0.0.1:0")
    with caplog.at_level(logging.INFO, "kvstore.audit"):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            await stub.Status(admin_pb2.StatusRequest())
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ChangeRing(admin_pb2.ChangeRingRequest(action="ADD", partitions=["p\n9"]))
        # A call leaves its line when it has ended, which its caller may hear of earlier.
        await wait_until(lambda: has_lines(caplog, 2), what="both calls have ended")
    await server.stop(0)
    one, two = lines_of(caplog)
    first, second = orjson.loads(one), orjson.loads(two)
    assert first.pop("from").startswith("ipv4:127.0.0.1:")
    assert first == {"time": 7, "who": "-", "call": "Status", "outcome": "OK", "took_ms": 0}
    assert second["arguments"] == 'action: ADD partitions: "p\\n9"'
    assert (second["call"], second["outcome"]) == ("ChangeRing", "INVALID_ARGUMENT")


class Context:
    def __init__(self, identity: dict[str, list[bytes]]) -> None:
        self._identity = identity

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._identity


def test_who_is_whom_the_certificate_names() -> None:
    assert who(Context({})) == "-"
    assert who(Context({"x509_common_name": [b"ops\n7"]})) == "'ops\\n7'"
    assert who(Context({"x509_subject_alternative_name": [b"n1", b"10.0.0.1"]})) == "'n1','10.0.0.1'"


def test_long_arguments_are_cut() -> None:
    assert len(arguments_of(admin_pb2.LedgersRequest(partition="p" * 9_000))) == ARGUMENTS_MAX + 1


def test_megabytes_of_arguments_are_not_written_down() -> None:
    """A request of 3 MB held the event loop for a second, to keep 500 characters of it."""
    asked = admin_pb2.ChangeRingRequest(action="ADD", partitions=["p"] * 1_000_000)
    assert arguments_of(asked) == "… 3000002 bytes"


class Called(Context):
    """By somebody at an address."""

    def __init__(self, address: str) -> None:
        super().__init__({})
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:1"

    async def abort(self, code: Any, details: str = "", metadata: Any = ()) -> None:
        raise grpc.aio.AbortError

    def code(self) -> Any:
        return grpc.StatusCode.INVALID_ARGUMENT


async def test_one_address_does_not_flood_the_log_and_what_it_changes_is_there_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LINES_MAX", 3)
    now = 0.0
    log = audit.AuditLog(lambda: now, lambda: 0)
    handlers = _Handlers(cast(Any, None), lambda: now, log, lambda: "")

    async def changed(request: Any, context: Any) -> Any:
        return request

    call = {
        method: handlers._audited(method, behaviour)
        for method, behaviour in (("Status", changed), ("Drain", changed), ("ChangeRing", Answers().ChangeRing))
    }
    with caplog.at_level(logging.INFO, "kvstore.audit"):
        for _ in range(5):
            await call["Status"](admin_pb2.StatusRequest(), Called("10.0.0.7"))
            with pytest.raises(grpc.aio.AbortError):
                await call["ChangeRing"](admin_pb2.ChangeRingRequest(), Called("10.0.0.7"))
        await call["Drain"](admin_pb2.DrainRequest(), Called("10.0.0.7"))
        await call["Status"](admin_pb2.StatusRequest(), Called("10.0.0.8"))
        now = audit.LINES_S
        await call["Status"](admin_pb2.StatusRequest(), Called("10.0.0.7"))
    lines = [orjson.loads(record.getMessage()) for record in caplog.records]
    shown = [(each["from"], each.get("call", each.get("lines_left_out"))) for each in lines]
    assert shown == [
        ("ipv4:10.0.0.7:1", "Status"),
        ("ipv4:10.0.0.7:1", "ChangeRing"),
        ("ipv4:10.0.0.7:1", "Status"),
        ("ipv4:10.0.0.7:1", "Drain"),
        ("ipv4:10.0.0.8:1", "Status"),
        ("10.0.0.7", 7),
        ("ipv4:10.0.0.7:1", "Status"),
    ]


def test_no_hash_of_a_password_is_written_down() -> None:
    for name in ("add_user", "set_password"):
        asked = admin_pb2.ChangeAccessRequest(**{name: {"name": "anna", "password_hash": "scrypt$secret"}})
        assert arguments_of(asked) == f'{name} {{ name: "anna" }}'
        assert getattr(asked, name).password_hash == "scrypt$secret"
