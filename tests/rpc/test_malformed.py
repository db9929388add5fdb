"""A message that cannot be parsed is rejected by every kind of method as not executed, and nothing is logged."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvstore.proto import kv_pb2, kv_pb2_grpc
from kvstore.rpc.server import GrpcServer
from tests.waiting import PATIENCE_S

MALFORMED = b"\xff\xff\xff"


class Service(kv_pb2_grpc.KVServicer):
    """One method of each kind."""

    def __init__(self) -> None:
        self.called = 0
        self.ended = asyncio.Event()

    async def Get(self, request: Any, context: Any) -> kv_pb2.GetResponse:
        self.called += 1
        return kv_pb2.GetResponse()

    async def Scan(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.called += 1
        try:
            while True:
                await context.write(kv_pb2.ScanResponse())
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def Watch(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.called += 1
        await context.write(kv_pb2.WatchResponse())

    async def Session(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        while await context.read() is not grpc.aio.EOF:
            self.called += 1
            await context.write(kv_pb2.Answers())


@pytest.fixture
async def served() -> AsyncIterator[tuple[Service, grpc.aio.Channel]]:
    service = Service()
    server = GrpcServer([], [lambda to: kv_pb2_grpc.add_KVServicer_to_server(service, to)])
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service, channel
    await server.stop(0)


async def code_of(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    path = f"/kvstore.v1.KV/{method}"
    call: Any
    try:
        match method:
            case "Get":
                await channel.unary_unary(path)(MALFORMED, timeout=PATIENCE_S)
            case "Session":
                call = channel.stream_stream(path)(timeout=PATIENCE_S)
                await call.write(MALFORMED)
                await call.read()
            case _:
                await channel.unary_stream(path)(MALFORMED, timeout=PATIENCE_S).read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["Get", "Scan", "Watch", "Session"])
async def test_unparsable_message_is_refused_instead_of_unknown(
    served: tuple[Service, grpc.aio.Channel], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    service, channel = served
    with caplog.at_level(logging.WARNING):
        assert await code_of(channel, method) is grpc.StatusCode.INVALID_ARGUMENT
    assert service.called == 0
    assert caplog.records == []


async def test_valid_messages_of_every_kind_are_answered(served: tuple[Service, grpc.aio.Channel]) -> None:
    service, channel = served
    stub: Any = kv_pb2_grpc.KVStub(channel)
    await stub.Get(kv_pb2.GetRequest(), timeout=PATIENCE_S)
    assert await stub.Watch(kv_pb2.WatchRequest(), timeout=PATIENCE_S).read() == kv_pb2.WatchResponse()
    session = stub.Session(timeout=PATIENCE_S)
    await session.write(kv_pb2.Frame())
    assert await session.read() == kv_pb2.Answers()
    await session.done_writing()
    assert await session.read() is grpc.aio.EOF
    assert service.called == 3


async def test_cancelled_stream_ends_its_method(served: tuple[Service, grpc.aio.Channel]) -> None:
    service, channel = served
    stub: Any = kv_pb2_grpc.KVStub(channel)
    call = stub.Scan(kv_pb2.ScanRequest())
    assert await call.read() == kv_pb2.ScanResponse()
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await service.ended.wait()


@pytest.mark.parametrize(
    "path",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_health_and_reflection_refuse_unparsable_messages_silently(
    served: tuple[Service, grpc.aio.Channel], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, channel = served
    call: Any = channel.stream_stream(path)(timeout=PATIENCE_S)
    await call.write(MALFORMED)
    await call.done_writing()
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []
