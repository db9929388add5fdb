"""Server reflection gives the same answers in both of its versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as alpha

from kvstore.proto import admin_pb2, data_pb2, feed_pb2, kv_pb2
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


async def asked(channel: grpc.aio.Channel, version: str, question: dict[str, Any]) -> Any:
    """Return the answer of one version. The messages of both have the same bytes."""
    call: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        alpha.ServerReflectionRequest.SerializeToString,
        alpha.ServerReflectionResponse.FromString,
    )
    answer = await call(iter([alpha.ServerReflectionRequest(**question)]), timeout=PATIENCE_S).read()
    assert answer is not grpc.aio.EOF
    return answer


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
async def test_both_versions_answer_alike(channel: grpc.aio.Channel, question: dict[str, Any]) -> None:
    newer = await asked(channel, "v1", question)
    assert newer == await asked(channel, "v1alpha", question)
    assert newer.WhichOneof("message_response")


async def test_listed_services_can_be_described(channel: grpc.aio.Channel) -> None:
    first = await asked(channel, "v1", {"list_services": ""})
    listed = {each.name for each in first.list_services_response.service}
    assert {"kvstore.v1.KV", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} < listed
    for name in sorted(listed):
        answer = await asked(channel, "v1", {"file_containing_symbol": name})
        assert answer.file_descriptor_response.file_descriptor_proto, name
        assert answer.original_request.file_containing_symbol == name


async def test_version_1_is_described_with_its_own_names(channel: grpc.aio.Channel) -> None:
    answer = await asked(channel, "v1", {"file_containing_symbol": "grpc.reflection.v1.ServerReflection"})
    (encoded,) = answer.file_descriptor_response.file_descriptor_proto
    described = descriptor_pb2.FileDescriptorProto.FromString(encoded)
    assert described.package == "grpc.reflection.v1"
    assert described.service[0].method[0].input_type == ".grpc.reflection.v1.ServerReflectionRequest"
    assert described.message_type[0].name == "ServerReflectionRequest"


def test_generated_code_has_a_package_in_other_languages() -> None:
    for module in FILES:
        found = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(found)
        assert (found.options.go_package, found.options.java_package, found.options.java_multiple_files) == (
            "github.com/kvstore-log/kvstore-go/kvstorev1;kvstorev1",
            "io.github.kvstorelog.v1",
            True,
        )
