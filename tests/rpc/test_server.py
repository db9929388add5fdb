"""The health service reports the state that the server sets, and a port in use is an error."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.rpc import channels
from kvstore.rpc.server import GrpcServer
from tests.waiting import PATIENCE_S, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, int]]:
    running = GrpcServer(["a.Service", "another.Service"], [])
    port = await running.start("127.0.0.1:0")
    yield running, port
    await running.stop(0)


async def health_of(port: int, service: str) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)).status


async def test_server_serves_after_set_serving(server: tuple[GrpcServer, int]) -> None:
    running, port = server
    assert await health_of(port, "") == NOT_SERVING
    await running.set_serving(True)
    assert [await health_of(port, name) for name in ("", "a.Service", "another.Service")] == [SERVING] * 3


async def test_one_service_can_be_unavailable(server: tuple[GrpcServer, int]) -> None:
    running, port = server
    await running.set_serving(True)
    await running.set_serving(False, "a.Service")
    assert await health_of(port, "a.Service") == NOT_SERVING
    assert await health_of(port, "another.Service") == SERVING


async def test_port_in_use_is_an_error(server: tuple[GrpcServer, int]) -> None:
    _, port = server
    with pytest.raises(OSError, match=str(port)):
        await GrpcServer([], []).start(f"127.0.0.1:{port}")


async def test_one_connection_cannot_use_all_calls(server: tuple[GrpcServer, int]) -> None:
    """The server's first frame contains HTTP/2's SETTINGS_MAX_CONCURRENT_STREAMS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server[1])
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    header = await reader.readexactly(9)
    assert header[3] == 4, "SETTINGS"
    settings = dict(struct.iter_unpack(">HI", await reader.readexactly(int.from_bytes(header[:3]))))
    assert settings[3] == channels.CONNECTION_CALLS_MAX < channels.CONCURRENT_CALLS_MAX
    writer.close()


async def test_connections_count_from_accept_and_must_send_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_MS", 500)
    running = GrpcServer(["a.Service"], [], 3)
    port = await running.start("127.0.0.1:0")
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]

    async def are_closed(count: int) -> bool:
        for reader, _ in silent:
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(reader.read(1000), 0.01)
        return sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) == count

    await wait_until(lambda: are_closed(8), timeout_s=PATIENCE_S)
    assert await health_of(port, "") == NOT_SERVING
    for _, writer in silent:
        writer.close()
    await running.stop(0)


@pytest.mark.slow
async def test_idle_connection_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes its clients' pings for a flood closes their connections. gRPC silently ignores unknown
    options, and then a few pings in five minutes are too many."""
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 100)
    running = GrpcServer(["a.Service"], [])
    port = await running.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channels.channel_options()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="a.Service"))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(TimeoutError):  # nothing more is sent and the connection stays: gRPC pings once per second
            await asyncio.wait_for(watch.read(), 5)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
    await running.stop(0)


async def test_connection_limit_keeps_existing_connections() -> None:
    server = GrpcServer((), (), connections_max=3)
    port = await server.start("127.0.0.1:0")
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
    refused = 0
    for reader, writer in opened:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        async with asyncio.timeout(PATIENCE_S):
            refused += await _first_byte(reader) == b""
    assert refused == 3
    for _, writer in opened:
        writer.close()
    await server.stop(0)


async def _first_byte(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1)
    except ConnectionError:
        return b""


async def watch_unread(port: int) -> asyncio.StreamWriter:
    """Watch the health without room for any answer. Returns once the server has started to answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    no_space = struct.pack(">HI", 4, 0)
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    head = b"".join(bytes((0, len(n))) + n.encode() + bytes((len(v),)) + v.encode() for n, v in fields.items())
    frames = ((4, 0, 0, no_space), (4, 1, 0, b""), (1, 4, 1, head), (0, 1, 1, bytes(5)))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    for kind, flags, stream, body in frames:
        writer.write(struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body)
    while True:
        header = await asyncio.wait_for(reader.readexactly(9), PATIENCE_S)
        await reader.readexactly(int.from_bytes(header[:3]))
        if header[3] == 1:  # HEADERS: their message waits for room
            return writer


async def test_watcher_that_reads_nothing_does_not_block_health() -> None:
    running = GrpcServer(["a.Service"], [])
    port = await running.start("127.0.0.1:0")
    writer = await watch_unread(port)
    async with asyncio.timeout(PATIENCE_S / 4):  # gRPC itself may close such a connection after a minute
        await running.set_serving(True)
        assert await health_of(port, "") == SERVING
        await running.stop(0.1)
    writer.close()


async def test_watcher_receives_each_change(server: tuple[GrpcServer, int]) -> None:
    running, port = server
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        known = stub.Watch(health_pb2.HealthCheckRequest(service="a.Service"), timeout=PATIENCE_S)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"), timeout=PATIENCE_S)
        assert (await known.read()).status == NOT_SERVING
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        for serving, status in ((True, SERVING), (False, NOT_SERVING)):
            await running.set_serving(serving)
            assert (await known.read()).status == status


async def test_watched_service_name_is_limited(server: tuple[GrpcServer, int]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[1]}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest(service="s" * 1_000_000), timeout=PATIENCE_S).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
