"""Each call of the admin service leaves a line that says who, from where, what and with which result."""

from __future__ import annotations

import logging
from typing import Any, cast

import grpc
import pytest

from kvstore.errors import InvalidRequest
from kvstore.proto import admin_pb2, admin_pb2_grpc
from kvstore.rpc.server import GrpcServer
from kvstore.rpc.status import abort
from kvstore.server.audit import ARGUMENTS_MAX, Audited, arguments_of, who


class Answers(admin_pb2_grpc.AdminServicer):
    async def Status(self, request: Any, context: Any) -> Any:
        return admin_pb2.StatusResponse(server="n1")

    async def ChangeRing(self, request: Any, context: Any) -> Any:
        await abort(context, InvalidRequest("no"))


async def test_a_line_for_each_call_with_its_arguments_and_result(caplog: pytest.LogCaptureFixture) -> None:
    server = GrpcServer(
        ("kvstore.v1.Admin",),
        (
            lambda each: admin_pb2_grpc.add_AdminServicer_to_server(
                Answers(), cast(grpc.aio.Server, Audited(each, lambda: 5.0))
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
    await server.stop(0)
    one, two = [record.getMessage() for record in caplog.records if record.name == "kvstore.audit"]
    assert one.startswith("who=- from=ipv4:127.0.0.1:")
    assert "call=Status arguments={} result=OK took_ms=" in one
    assert 'call=ChangeRing arguments={action: ADD partitions: "p\\n9"} result=INVALID_ARGUMENT' in two


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
