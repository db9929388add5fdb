"""Garbage at every port of a real node: the node replies with an error or closes, never dies, and does not grow."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import grpc
import psutil
import pytest

from kvstore.proto import bookkeeper as wire
from tests.cluster.harness import Cluster, running_cluster
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.cluster]

ROUNDS = 150
GROWTH_BYTES_MAX = 160 << 20
"""Maximum growth of the node's memory over a test."""
Bytes = Callable[[random.Random], bytes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("fuzz")) as started:
        yield started


@pytest.fixture
def unharmed(cluster: Cluster) -> Iterator[Cluster]:
    """Check that the same process serves at every port afterwards and has not grown much."""
    pid = cluster.pid("n1")
    before = psutil.Process(pid).memory_info().rss
    yield cluster
    assert cluster.is_running("n1"), cluster.last_words()
    assert cluster.pid("n1") == pid
    assert cluster.redis("n1").set("alive", "yes") is True
    assert cluster.redis("n2").get("alive") == b"yes"
    cluster.wait_ready("n1")
    with grpc.insecure_channel("{}:{}".format(*cluster.address("n1", "grpc"))) as channel:
        grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
    grown = psutil.Process(pid).memory_info().rss - before
    assert grown < GROWTH_BYTES_MAX, f"{grown >> 20} MiB more than before"


def send(address: tuple[str, int], data: bytes, *, wait_s: float = PATIENCE_S, bytes_max: int = 1 << 20) -> bytes:
    """Return the port's reply until it closes or falls silent, at most about `bytes_max`."""
    with socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.settimeout(wait_s)
        answer = b""
        with suppress(OSError):  # it may have answered, and closed, before it has had all
            connection.sendall(data)
        with suppress(OSError):
            while len(answer) < bytes_max and (part := connection.recv(65536)):
                answer += part
        return answer


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 7, 64, 1500, 70_000)))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return `data` with some of its bytes changed, removed or doubled."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(4):
            case 0:
                found[at : at + 1] = rng.randbytes(1)
            case 1:
                del found[at : at + rng.randint(1, 6)]
            case 2:
                found[at:at] = found[: rng.randint(1, 20)]
            case _:
                found[at:at] = rng.choice((b"\r\n", b"$", b"*", b"-1", b"999999999", b"\0", b"\xff\xff\xff\xff"))
    return bytes(found)


REDIS = b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$5\r\nvalue\r\n*2\r\n$3\r\nGET\r\n$3\r\nkey\r\nPING\r\nHELLO 3\r\n"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n"


def bookie_frames(rng: random.Random) -> bytes:
    """Return frames of the bookie's protocol: wrong lengths, invalid requests, and requests with wrong bytes."""
    request = wire.encode_read(rng.getrandbits(31), rng.getrandbits(31), rng.getrandbits(31))
    whole = b"".join(request) if isinstance(request, list | tuple) else bytes(request)
    lie = struct.pack(">I", rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 5 << 20, len(whole))))
    body = rng.randbytes(rng.randint(0, 300))
    return rng.choice((whole + mutated(rng, whole), lie + body, struct.pack(">I", len(body)) + body + whole))


KINDS: dict[str, tuple[str, Bytes]] = {
    "noise at the Redis port": ("resp", noise),
    "broken commands": ("resp", lambda rng: mutated(rng, REDIS)),
    "noise at the gRPC port": ("grpc", noise),
    "broken HTTP/2": ("grpc", lambda rng: HTTP2 + mutated(rng, rng.randbytes(200))),
    "noise at the HTTP port": ("http", noise),
    "broken HTTP": ("http", lambda rng: mutated(rng, HTTP)),
    "noise at the bookie's port": ("bookie", noise),
    "broken frames for the bookie": ("bookie", bookie_frames),
}


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_at_a_port_harms_no_other_client(unharmed: Cluster, kind: str) -> None:
    endpoint, make = KINDS[kind]
    rng = random.Random(kind)
    address = unharmed.address("n1", endpoint)
    for _ in range(ROUNDS):
        send(address, make(rng), wait_s=0.02)


def test_invalid_redis_commands_get_errors_and_keep_the_connection(unharmed: Cluster) -> None:
    def command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)

    with socket.create_connection(unharmed.address("n1", "resp"), timeout=PATIENCE_S) as connection:
        for words in (
            (b"NOSUCH", b"x"),
            (b"GET",),
            (b"SET", b"k" * 5000, b"v"),
            (b"SET", b"k", b"v" * (2 << 20)),
            (b"SET", b"", b"v"),
            (b"INCRBY", b"k", b"1e400"),
            (b"SET", b"k", b"v", b"EX", b"-1"),
            (b"X" * (1 << 20),),
        ):
            connection.sendall(command(*words))
            answer = connection.recv(65536)
            assert answer.startswith(b"-"), (words[0][:20], answer[:100])
            assert len(answer) < 1000, "an error does not repeat what was sent"
        connection.sendall(b"PING\r\n")
        assert connection.recv(100) == b"+PONG\r\n"


@pytest.mark.parametrize(
    "frame", [b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$900000000\r\n", b"*2000000000\r\n", b"*1\r\n$-7\r\n", b"x" * 200_000]
)
def test_redis_frame_with_too_large_a_length_ends_its_connection(unharmed: Cluster, frame: bytes) -> None:
    assert send(unharmed.address("n1", "resp"), frame).startswith(b"-ERR")


def test_memory_is_bounded_when_many_clients_send_half_of_a_large_value(unharmed: Cluster) -> None:
    with ExitStack() as open_:
        for _ in range(60):
            connection = socket.create_connection(unharmed.address("n1", "resp"), timeout=5)
            open_.callback(connection.close)
            with suppress(OSError):
                connection.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1048576\r\n" + b"v" * 1_000_000)
        assert unharmed.redis("n1").set("meanwhile", "served") is True


def test_grpc_refuses_malformed_and_large_messages_and_unknown_methods(unharmed: Cluster) -> None:
    def call(method: str, payload: bytes) -> grpc.StatusCode:
        stub = channel.unary_unary(
            method, request_serializer=lambda data: data, response_deserializer=lambda data: data
        )
        with pytest.raises(grpc.RpcError) as refused:
            stub(payload, timeout=PATIENCE_S)
        return refused.value.code()

    options = [("grpc.max_send_message_length", 64 << 20)]
    with grpc.insecure_channel("{}:{}".format(*unharmed.address("n1", "grpc")), options=options) as channel:
        assert call("/kvstore.v1.KV/Nothing", b"") is grpc.StatusCode.UNIMPLEMENTED
        assert call("/kvstore.v1.KV/Put", os.urandom(6 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        oversize_key = b"\x0a\x88\x27" + b"k" * 5000
        assert call("/kvstore.v1.KV/Put", oversize_key) is grpc.StatusCode.INVALID_ARGUMENT
        rng = random.Random(1)
        for _ in range(100):
            malformed = b"\xff" + rng.randbytes(rng.randint(1, 200))
            assert call("/kvstore.v1.KV/Get", malformed) is grpc.StatusCode.INVALID_ARGUMENT


def test_http_refuses_bodies_and_endless_headers(unharmed: Cluster) -> None:
    address = unharmed.address("n1", "http")
    large = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000000\r\n\r\n" + b"x" * (1 << 20)
    wanted = b"HTTP/1.1 4"
    assert send(address, large, bytes_max=len(wanted)).startswith(wanted)
    endless = b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: %s\r\n" % (each, b"y" * 1000) for each in range(2000))
    assert not send(address, endless, wait_s=1).startswith(b"HTTP/1.1 200")
