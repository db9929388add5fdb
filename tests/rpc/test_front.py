"""gRPC with TLS and without on one port (docs/protocol.md S1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.env import accepting
from kvstore.env.certificates import Certificates
from kvstore.env.tls import Mode
from kvstore.rpc import front as module
from kvstore.rpc.callers import caller_of
from kvstore.rpc.server import GrpcServer
from tests.certificates import Files
from tests.cluster.access.attackers import hello_of
from tests.waiting import PATIENCE_S, wait_until

METHOD = "/a.Service/Echo"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files.issue(tmp_path_factory.mktemp("tls"))


async def _echo(request: bytes, context: Any) -> bytes:
    names = context.auth_context().get("x509_common_name", []) + context.auth_context().get("x509_subject", [])
    told = ("verified", str(bool(names)).lower()), ("caller", caller_of(context)), ("peer", context.peer())
    await context.send_initial_metadata(told)
    return request


def _register(server: grpc.aio.Server) -> None:
    handler = grpc.method_handlers_generic_handler(
        "a.Service",
        {"Echo": grpc.unary_unary_rpc_method_handler(_echo, request_deserializer=bytes, response_serializer=bytes)},
    )
    server.add_generic_rpc_handlers((handler,))


@asynccontextmanager
async def served(
    files: Files, *, connections_max: int = 100, verifies: bool = False
) -> AsyncIterator[tuple[Certificates, int]]:
    async with served_by(files, connections_max=connections_max, verifies=verifies) as (certificates, port, _):
        yield certificates, port


@asynccontextmanager
async def served_by(
    files: Files, *, connections_max: int = 100, verifies: bool = False, mode: Mode = Mode.PREFER
) -> AsyncIterator[tuple[Certificates, int, module.Front]]:
    certificates = Certificates(replace(files.bookie, mode=mode, verify_clients=verifies))
    server = GrpcServer(("a.Service",), (_register,), connections_max)
    port = await server.start("127.0.0.1:0", certificates)
    await server.set_serving(True)
    async with asyncio.timeout(PATIENCE_S):
        assert server._front is not None
        yield certificates, port, server._front
    await server.stop(0)


def channel(files: Files, port: int, *, tls: bool) -> grpc.aio.Channel:
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 8 << 20))
    if not tls:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
    credentials = grpc.ssl_channel_credentials(*files.client.contents())
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)


def when(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return condition()

    return holds


async def health(files: Files, port: int, *, tls: bool) -> Any:
    async with channel(files, port, tls=tls) as one:
        stub: Any = health_pb2_grpc.HealthStub(one)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status


async def test_one_port_accepts_tls_and_plain_and_counts_plain(files: Files) -> None:
    async with served(files) as (certificates, port):
        assert await health(files, port, tls=True) == SERVING
        assert certificates.plain == 0
        assert await health(files, port, tls=False) == SERVING
        assert certificates.plain == 1


@pytest.mark.parametrize("tls", [True, False])
async def test_large_and_concurrent_messages_are_forwarded_whole(files: Files, tls: bool) -> None:
    async with served(files) as (_, port), channel(files, port, tls=tls) as one:
        ask = one.unary_unary(METHOD)
        asked = [bytes([number]) * (3 << 20) for number in range(8)]
        assert await asyncio.gather(*(ask(each) for each in asked)) == asked


async def test_client_certificate_is_verified_behind_the_front(files: Files) -> None:
    async with served(files, verifies=True) as (_, port), channel(files, port, tls=True) as one:
        call = one.unary_unary(METHOD)(b"x")
        assert await call == b"x"
        assert dict(await call.initial_metadata())["verified"] == "true"


async def test_silent_connection_is_closed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "OPENING_S", 0.01)
    async with served(files) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


async def test_connections_are_limited(files: Files) -> None:
    async with served(files, connections_max=2) as (_, port):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in opened:
            writer.write(b"x")
        ended = [asyncio.create_task(reader.read()) for reader, _ in opened]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        for task in ended:
            task.cancel()
        for _, writer in opened:
            writer.transport.abort()


async def test_connection_closed_by_client_is_dropped(files: Files) -> None:
    """Connections with both sides ended used to stay open: after `connections_max` clients a node accepted none."""
    async with served_by(files, connections_max=3) as (_, port, front):
        for _ in range(6):
            assert await health(files, port, tls=False) == SERVING

        async def is_over() -> bool:
            return not front._relays

        await wait_until(is_over, what="nothing is carried")


async def half_closed(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x")
    writer.write_eof()
    return reader, writer


async def test_half_closed_connection_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING_S", 0.05)
    told: list[bytes] = []

    async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told.append(await reader.read())
        writer.write(b"the answer")
        await asyncio.Event().wait()

    behind = await asyncio.start_server(never_ends, "127.0.0.1", 0)
    inner = behind.sockets[0].getsockname()[1]
    front = module.Front(1, lambda: None)
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await half_closed(await front.open("127.0.0.1:0", with_tls=inner, without=inner))
        assert await reader.read() == b"the answer"
    assert told == [b"x"]
    writer.close()
    behind.close()
    await front.close()


async def test_connections_end_with_the_server_and_free_the_port(files: Files) -> None:
    async with served(files) as (_, port):
        one = channel(files, port, tls=False)
        assert await one.unary_unary(METHOD)(b"x") == b"x"
    await one.close()

    async def is_free() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await wait_until(is_free, what="nobody listens")


class Wire:
    """A transport that records written bytes."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.written = b""
        self._host = host
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self._host, 1) if name == "peername" else None

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True


async def test_immediate_server_bytes_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop passes the first bytes to a protocol before the connecting task continues, and gRPC servers send first.
    This used to raise an error in the connection's callback and close the connection."""
    front = module.Front(1, lambda: None)
    relay, outer, inner = module._Relay(front, 1, 2), Wire(), Wire()
    relay.connection_made(outer)

    async def connected(factory: Callable[[], Any], *_: Any) -> None:
        side = factory()
        side.connection_made(inner)
        side.data_received(b"settings")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connected)
    relay._first = b"preface"
    await relay.connect(2)
    assert (outer.written, inner.written) == (b"settings", b"preface")
    relay.end()
    await front.close()


async def test_blocked_connection_counts_until_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING_S", 0.01)
    front = module.Front(1, lambda: None)
    relay, outer = module._Relay(front, 1, 2), Wire()
    relay.connection_made(outer)
    relay.end()
    assert is_refused(front)

    async def is_broken_off() -> bool:
        return outer.is_aborted

    await wait_until(is_broken_off, what="it is broken off")
    relay.connection_lost(None)
    assert not is_refused(front)
    await front.close()


def is_refused(front: module.Front) -> bool:
    """Return True if there is no slot for one more connection."""
    relay, outer = module._Relay(front, 1, 2), Wire()
    relay.connection_made(outer)
    return outer.is_aborted


async def test_network_with_fewer_connections_gets_a_slot() -> None:
    front = module.Front(3, lambda: None)
    wires = [Wire("127.0.1.1") for _ in range(3)]
    for wire in [*wires, late := Wire("127.0.1.2")]:
        module._Relay(front, 1, 2).connection_made(wire)
    assert [wire.is_aborted for wire in (*wires, late)] == [True, False, False, False]
    assert is_refused(front) is False, "a third network"
    await front.close()


@pytest.mark.parametrize("mode", [Mode.PREFER, Mode.REQUIRE])
async def test_caller_of_forwarded_call_is_the_client(files: Files, mode: Mode) -> None:
    """gRPC sees the front as the peer of every call. Audit lines, limits per network and delays after wrong passwords
    used to apply to the loopback address."""
    async with served_by(files, mode=mode) as (_, port, front), channel(files, port, tls=True) as one:
        call = one.unary_unary(METHOD)(b"x", timeout=PATIENCE_S)
        told = dict(await call.initial_metadata() or ())
        assert front.carried == {unquote(told["peer"]): told["caller"]}
        assert told["caller"] != unquote(told["peer"])
    await wait_until(when(lambda: front.carried == {}))


# docs/protocol.md S1
async def test_connection_without_tls_is_closed_when_tls_is_required(files: Files) -> None:
    async with served_by(files, mode=Mode.REQUIRE) as (_, port, _):
        assert await health(files, port, tls=True) == SERVING
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_handshake_begins_only_with_complete_hello(files: Files) -> None:
    """A partial hello used to occupy one of gRPC's connections for the whole handshake timeout."""
    async with served_by(files, mode=Mode.REQUIRE) as (certificates, port, front):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        hello = hello_of(certificates.tls.client_context())
        writer.write(hello[:-1])
        (acceptor,) = front._acceptors
        await wait_until(when(lambda: len(acceptor._waiting) == 1))
        assert len(front._relays) == 0
        writer.write(hello[-1:])
        await wait_until(when(lambda: len(front.carried) == 1))
        writer.close()


async def test_clients_are_served_while_another_network_holds_every_slot(files: Files) -> None:
    async with served_by(files, mode=Mode.REQUIRE, connections_max=20) as (certificates, port, front):
        context = certificates.tls.client_context()
        context.set_alpn_protocols(["h2"])
        held = []
        for number in range(20):
            own = f"127.0.1.{1 + number % 4}", 0
            held.append(await asyncio.open_connection("127.0.0.1", port, local_addr=own, ssl=context))
        assert len(front._relays) == 20
        assert await health(files, port, tls=True) == SERVING
        for _, writer in held:
            writer.close()
