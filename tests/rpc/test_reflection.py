"""Server reflection gives the same answers in both of its versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as alpha
from grpc_reflection.v1alpha import reflection_pb2_grpc as alpha_grpc

from kvstore.proto import admin_pb2, data_pb2, feed_pb2, kv_pb2, reflection_pb2, reflection_pb2_grpc
from kvstore.rpc.server import GrpcServer
from tests.waiting import PATIENCE_S

FILES = (admin_pb2, data_pb2, feed_pb2, kv_pb2)
QUESTIONS: list[dict[str, Any]] = [
    {"list_services": ""},
    {"file_by_filename": "kvstore/proto/kv.proto"},
    {"file_by_filename": "nothing.proto"},
    {"file_containing_symbol": "kvstore.v1.KV"},
    {"file_containing_symbol": "grpc.reflection.v1.ServerReflection"},
    {"file_containing_symbol": "kvstore.v1.Nothing"},
    {"file_containing_extension": {"containing_type": "kvstore.v1.Record", "extension_number": 7}},
    {"all_extension_numbers_of_type": "kvstore.v1.Record"},
    {},
]


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(("kvstore.v1.KV",), ())
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(0)


async def asked(stub: Any, kind: Any, question: dict[str, Any]) -> bytes:
    """Return the answer without the request in it."""
    call = stub.ServerReflectionInfo(iter([kind(**question)]), timeout=PATIENCE_S)
    answer = await call.read()
    assert answer is not grpc.aio.EOF
    answer.ClearField("original_request")
    return bytes(answer.SerializeToString(deterministic=True))


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
async def test_both_versions_answer_alike(channel: grpc.aio.Channel, question: dict[str, Any]) -> None:
    newer = await asked(
        reflection_pb2_grpc.ServerReflectionStub(channel), reflection_pb2.ServerReflectionRequest, question
    )
    older = await asked(alpha_grpc.ServerReflectionStub(channel), alpha.ServerReflectionRequest, question)
    assert newer == older
    assert newer


async def test_listed_services_can_be_described(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    first: Any = await call.read()
    listed = {each.name for each in first.list_services_response.service}
    assert {"kvstore.v1.KV", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} < listed
    for name in sorted(listed):
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
        answer: Any = await stub.ServerReflectionInfo(iter([request])).read()
        files = answer.file_descriptor_response.file_descriptor_proto
        assert files, name
        assert answer.original_request == request


def test_generated_code_has_a_package_in_other_languages() -> None:
    for module in FILES:
        found = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(found)
        assert (found.options.go_package, found.options.java_package, found.options.java_multiple_files) == (
            "github.com/kvstore-log/kvstore-go/kvstorev1;kvstorev1",
            "io.github.kvstorelog.v1",
            True,
        )


def test_both_versions_use_the_same_messages() -> None:
    """The answers have the same fields: only the package differs."""
    ours, theirs = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(ours)
    alpha.DESCRIPTOR.CopyToProto(theirs)
    text = str(theirs.message_type).replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
    assert str(ours.message_type) == text
    assert str(ours.service) == str(theirs.service).replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
