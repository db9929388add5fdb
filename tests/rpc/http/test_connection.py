"""The HTTP connections of a port, by the bytes that clients send and receive."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from kvstore.env.networks import KnownNetworks
from kvstore.rpc.http import connection
from kvstore.rpc.http.connection import HttpServer
from kvstore.rpc.http.messages import HttpRequest, MalformedBody, text_response
from tests.env.runners import on_both
from tests.waiting import PATIENCE_S, wait_until


class Port:
    """A port whose handler records requests, and echoes each request's method, target and body."""

    def __init__(self, connections_max: int) -> None:
        self.seen: list[str] = []
        self.reads_body = True
        self.resume = asyncio.Event()
        self.resume.set()
        self.server = HttpServer(self.answer, connections_max, KnownNetworks())
        self.port = 0

    async def answer(self, request: HttpRequest) -> None:
        self.seen.append(f"{request.method} {request.target}")
        await self.resume.wait()
        body = b""
        try:
            while self.reads_body and (data := await request.body.read()):
                body += data
        except (ConnectionError, MalformedBody) as error:
            await request.respond(text_response(f"{type(error).__name__}\n", 400))
            return
        await request.respond(text_response(f"{request.method} {request.target} {len(body)} {body[:20].decode()}\n"))

    async def ask(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def answers(self, data: bytes) -> bytes:
        """Return all that the server sends until it closes the connection."""
        reader, writer = await self.ask(data)
        async with asyncio.timeout(PATIENCE_S):
            found = await reader.read()
        writer.close()
        return found


@asynccontextmanager
async def opened(connections_max: int = 100) -> AsyncIterator[Port]:
    port = Port(connections_max)
    listening = await asyncio.get_running_loop().create_server(port.server, "127.0.0.1", 0)
    port.port = listening.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        listening.close()
        await port.server.close()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with opened() as port:
        yield port


def bodies_of(data: bytes) -> list[bytes]:
    """Return the bodies of responses that have a Content-Length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(rest[:length])
        data = rest[length:]
    return found


async def test_pipelined_requests_are_answered_in_order(port: Port) -> None:
    put = b"PUT /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
    data = b"".join(put % number for number in range(50)) + b"GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    found = bodies_of(await port.answers(data))
    assert found == [*(b"PUT /%d 2 ab\n" % number for number in range(50)), b"GET /end 0 \n"]


async def test_requests_are_read_wherever_they_are_cut(port: Port) -> None:
    """The end of a request is found also if it arrives in two parts, and with the beginning of the next request."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    data = (
        b"PUT /a HTTP/1.1\r\nHost: a\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\na\r\n\r\n4\r\n\r\n\r\n\r\n0\r\nT: x\r\nU: y\r\n\r\n"
        b"PUT /b HTTP/1.1\r\nHost: a\r\n%bTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n\r\n"
        b"PUT /c HTTP/1.1\r\nHost: a\r\n%bContent-Length: 6\r\n\r\n\r\n\r\nGE"
        b"GET /d HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /behind HTTP/1.1\r\nHost: a\r\n\r\n"
    ) % (upgrade, upgrade)
    for cut in range(len(data)):
        port.seen.clear()
        reader, writer = await port.ask(b"")
        await wait_until(lambda: _open(port, 1), what="the connection")
        (open_,) = port.server._open
        open_.data_received(data[:cut])
        open_.data_received(data[cut:])
        async with asyncio.timeout(PATIENCE_S):
            found = bodies_of(await reader.read())
        writer.close()
        assert found == [b"PUT /a 7 a\r\n\r\n\r\n\n", b"PUT /b 1 b\n", b"PUT /c 6 \r\n\r\nGE\n", b"GET /d 0 \n"], cut
        await wait_until(lambda: _open(port, 0), what="the end of the connection")


async def test_requests_that_wait_are_not_parsed(port: Port) -> None:
    """A client may send thousands of requests at once. Only the one that is answered is held as a request."""
    port.resume.clear()
    reader, writer = await port.ask(b"GET /k HTTP/1.1\r\nHost: a\r\n\r\n" * 20_000)
    await wait_until(lambda: _has(port, 1), what="the first request")
    (open_,) = port.server._open
    assert open_._next is None
    assert not open_._is_reading, "the kernel holds the rest"
    writer.transport.abort()
    port.resume.set()
    del reader


async def _has(port: Port, count: int) -> bool:
    return len(port.seen) >= count


async def test_body_that_nobody_reads_is_bounded(port: Port) -> None:
    port.resume.clear()
    reader, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 100000000\r\n\r\n")
    await wait_until(lambda: _has(port, 1), what="the request")
    (open_,) = port.server._open
    data = b"x" * 1_000_000
    writer.write(data * 4)

    async def is_paused() -> bool:
        return not open_._is_reading

    await wait_until(is_paused, what="reading pauses")
    assert open_._body is not None
    assert open_._body.unread <= connection.BODY_BUFFER_BYTES + (1 << 20)
    writer.transport.abort()
    port.resume.set()
    del reader


async def test_client_that_sends_tiny_pieces_does_not_hold_up_the_others(port: Port) -> None:
    """A blank line in a body may be the body's end, so the parser gets each of them separately."""
    reader, writer = await port.ask(b"")
    await wait_until(lambda: _open(port, 1), what="the connection")
    (open_,) = port.server._open
    head, body = b"PUT /k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"a\r\n\r\n" * 1_000
    open_.data_received(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    assert open_._body is not None
    assert open_._body.unread <= connection.PIECES_MAX * 5
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"PUT /k %d a" % len(body))
    writer.close()


async def test_connections_together_parse_a_limited_number_of_bytes_in_a_turn(port: Port) -> None:
    """200 connections of one client, each with chunks of one byte, held the event loop for more than a second."""
    count, chunks = 50, 10_000
    head = b"PUT /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    clients = [await port.ask(b"") for _ in range(count)]
    await wait_until(lambda: _open(port, count), what="the connections")
    most = before = 0
    for each in port.server._open:
        each.data_received(head + b"1\r\na\r\n" * chunks + b"0\r\n\r\n")

    def unparsed() -> int:
        return sum(len(each._unparsed) - each._at for each in port.server._open)

    before = unparsed()
    assert before > count * chunks * 6 - connection.TURN_BYTES - connection.PIECE_BYTES
    while before:
        await asyncio.sleep(0)
        most, before = max(most, before - unparsed()), unparsed()
    assert most <= connection.TURN_BYTES + connection.PIECE_BYTES
    for reader, writer in clients:
        async with asyncio.timeout(PATIENCE_S):
            assert b"PUT /a %d aaa" % chunks in await reader.read()
        writer.close()


async def test_body_is_read_on_once_its_handler_reads(port: Port) -> None:
    port.resume.clear()
    size = 3_000_000
    reader, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
    await wait_until(lambda: _has(port, 1), what="the request")
    port.resume.set()
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b"\r\n\r\n")
        assert (await reader.readline()).startswith(b"PUT /k %d x" % size)
    writer.close()


async def test_request_for_another_protocol_is_answered_in_this_one(port: Port) -> None:
    """Java's client offers HTTP/2 with its first request. The parser would drop the body of such a request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAE\r\n"
    put = b"PUT /k HTTP/1.1\r\nHost: a\r\n%bContent-Length: 5\r\n\r\nvalue" % offer
    chunked = b"PUT /c HTTP/1.1\r\nHost: a\r\n%bTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n" % offer
    found = await port.answers(put + chunked + b"GET /e HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert bodies_of(found) == [b"PUT /k 5 value\n", b"PUT /c 2 ab\n", b"GET /e 0 \n"]


async def test_connect_is_refused(port: Port) -> None:
    assert (await port.answers(b"CONNECT other:443 HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
    assert port.seen == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
        (b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na", b"400"),
        (b"PUT /k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\na", b"400"),
        (b"GET /k HTTP/1.1\nHost: a\n\n", b"400"),
        (b"GET /k HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n", b"400"),
        (b"GET /k HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n", b"400"),
        (b"GET /k HTTP/1.1\r\nA: b\r\n\r\n", b"400"),
        (b"GET /k HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", b"400"),
        (b"GET /k HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET /k HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + (b"A: " + b"x" * 9_000 + b"\r\n") * 9 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * 200_000, b"431"),
    ],
)
async def test_bytes_that_are_not_a_request_end_the_connection(port: Port, data: bytes, status: bytes) -> None:
    """A request behind a bad one might be a part of it. So nothing behind it is answered."""
    found = await port.answers(data + b"GET /behind HTTP/1.1\r\nHost: a\r\n\r\n")
    assert found.split(b" ")[1] == status
    assert found.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in found
    assert port.seen == []


async def test_earlier_requests_are_answered_before_a_bad_one(port: Port) -> None:
    found = await port.answers(
        b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\nno request\r\n\r\n"
    )
    assert [each.split(b" ")[0] for each in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


async def test_handler_is_told_of_a_broken_body(port: Port) -> None:
    head = b"PUT /k HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await port.ask(head)
    await wait_until(lambda: _has(port, 1), what="the request")
    writer.write(b"zz\r\n")
    async with asyncio.timeout(PATIENCE_S):
        found = await reader.read()
    writer.close()
    assert bodies_of(found) == [b"MalformedBody\n"]


async def test_early_response_reaches_a_client_that_still_sends(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the connection were closed at once, the kernel would reset it, and the client could lose the response."""
    port.reads_body = False
    reader, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 50000000\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert await reader.read() == b"PUT /k 0 \n"
        writer.write(b"x" * 1_000_000)
        await writer.drain()
    writer.close()
    monkeypatch.setattr(connection, "LINGER_S", 0.0)
    reader, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 50000000\r\n\r\n")
    await wait_until(lambda: _open(port, 0), what="a client that sends on for ever is disconnected")
    writer.close()


async def _open(port: Port, count: int) -> bool:
    return len(port.server._open) == count


async def test_client_may_close_its_half_after_the_request(port: Port) -> None:
    port.resume.clear()
    reader, writer = await port.ask(b"GET /k HTTP/1.1\r\nHost: a\r\n\r\n")
    writer.write_eof()
    await wait_until(lambda: _has(port, 1), what="the request")
    port.resume.set()
    async with asyncio.timeout(PATIENCE_S):
        assert bodies_of(await reader.read()) == [b"GET /k 0 \n"]
    writer.close()


@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (b"GET /k HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"GET /k HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", False),
        (b"GET /k HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"GET /k HTTP/1.0\r\n\r\n", False),
    ],
)
async def test_connection_is_kept_as_the_client_asks(port: Port, head: bytes, stays: bool) -> None:
    reader, writer = await port.ask(head)
    async with asyncio.timeout(PATIENCE_S):
        told = await reader.readuntil(b"\r\n\r\n")
        await reader.readline()
        assert (b"Connection: close" in told) is not stays
        assert (b"Connection: keep-alive" in told) is (stays and b"1.0" in head)
        if stays:
            writer.write(head)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        else:
            assert await reader.read() == b""
    writer.close()


async def test_head_has_no_body(port: Port) -> None:
    found = await port.answers(b"HEAD /k HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert found.endswith(b"\r\n\r\n")
    assert b"Content-Length: 11\r\n" in found


async def test_closing_port_lets_a_request_end() -> None:
    async with opened() as port:
        port.resume.clear()
        reader, writer = await port.ask(b"GET /k HTTP/1.1\r\nHost: a\r\n\r\n")
        idle, waits = await port.ask(b"")
        await wait_until(lambda: _has(port, 1), what="the request")
        closing = asyncio.ensure_future(port.server.close())
        async with asyncio.timeout(PATIENCE_S):
            assert await idle.read() == b""
            port.resume.set()
            assert bodies_of(await reader.read()) == [b"GET /k 0 \n"]
            await closing
        writer.close()
        waits.close()


async def test_requests_of_clients_that_are_gone_are_limited() -> None:
    """Such a request is answered to its end. Otherwise a client could begin any number of them and disconnect."""
    async with opened(connections_max=1) as port:
        port.resume.clear()
        for number in range(1, connection.ANSWERING_FACTOR + 1):
            _, writer = await port.ask(b"GET /k HTTP/1.1\r\nHost: a\r\n\r\n")
            await wait_until(partial(_has, port, number), what="the request")
            (open_,) = port.server._open
            open_.abort()
            writer.close()
            await wait_until(lambda: _open(port, 0), what="the end of the connection")
        assert (await port.answers(b"GET /more HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        port.resume.set()
        await wait_until(lambda: _is_idle(port), what="the end of the requests")
        assert (await port.answers(b"GET /k HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200 "
        )
        assert port.server.answering == 0


async def test_closing_port_does_not_wait_for_a_client_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SHUTDOWN_S", 1000.0)
    async with opened() as port:
        port.resume.clear()
        _, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        await wait_until(lambda: _has(port, 1), what="the request")
        (open_,) = port.server._open
        closing = asyncio.ensure_future(port.server.close())
        await asyncio.sleep(0)
        open_.abort()
        async with asyncio.timeout(PATIENCE_S):
            await closing
        writer.close()


async def test_response_comes_first_when_the_trailers_are_too_long(port: Port) -> None:
    """The last piece of the trailers exceeds the limit and ends the body."""
    reader, writer = await port.ask(b"")
    await wait_until(lambda: _open(port, 1), what="the connection")
    (open_,) = port.server._open
    open_.data_received(b"PUT /k HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
    size = connection.HEADERS_BYTES_MAX + connection.HEADER_BYTES_MAX + 1
    trailers = b"1\r\na\r\n0\r\n" + (b"T: " + b"x" * 995 + b"\r\n") * 80
    trailers += b"U: ".ljust(size - len(trailers) - 4, b"x") + b"\r\n\r\n"
    assert len(trailers) % connection.PIECE_BYTES > 1, "only the last piece exceeds the limit"
    open_.data_received(trailers)
    async with asyncio.timeout(PATIENCE_S):
        assert bodies_of(await reader.read()) == [b"PUT /k 1 a\n"]
    writer.close()


async def test_handler_that_fails_is_answered(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(request: HttpRequest) -> None:
        raise ValueError(request.target)

    answer: Callable[[HttpRequest], object] = fail
    monkeypatch.setattr(port.server, "answer", answer)
    assert (await port.answers(b"GET /k HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 500 ")


async def test_connection_ends_with_a_request_whose_handler_is_cancelled(port: Port) -> None:
    """Otherwise the client would take the response to its next request for the missing one."""
    answer = port.server.answer

    async def cancel(request: HttpRequest) -> None:
        port.server.answer = answer
        raise asyncio.CancelledError

    port.server.answer = cancel
    assert await port.answers(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n") == b""
    assert port.seen == []


async def test_aborted_connection_begins_no_request(port: Port) -> None:
    async def abort(request: HttpRequest) -> None:
        port.seen.append(request.target)
        await request.respond(text_response("begun\n"))
        request.connection.abort()

    port.server.answer = abort
    await port.ask(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n")
    await wait_until(lambda: _has(port, 1), what="the request")
    await wait_until(lambda: _open(port, 0), what="the end of the connection")
    assert port.seen == ["/a"]


async def test_request_behind_an_announced_end_is_not_begun(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that begins before the request's body has arrived announces the end of the connection. The client
    drops what it sent behind that request, and sends it again elsewhere."""
    begun, seen = asyncio.Event(), list[str]()

    async def stream(request: HttpRequest) -> None:
        seen.append(request.target)
        await request.stream({})
        begun.set()
        while await request.body.read():
            pass

    monkeypatch.setattr(port.server, "answer", stream)
    reader, writer = await port.ask(b"PUT /k HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n")
    await begun.wait()
    writer.write(b"vPUT /next HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        found = await reader.read()
    writer.close()
    assert b"Connection: close\r\n" in found
    assert seen == ["/k"]


@pytest.mark.parametrize("head", [b"Connection: close\r\n", b""])
async def test_client_that_takes_no_last_response_is_disconnected(
    port: Port, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """The response is small enough for the transport's buffer, so its handler does not wait for the client."""
    monkeypatch.setattr(connection, "SEND_S", 0.0)

    async def answer(request: HttpRequest) -> None:
        await port.resume.wait()
        (open_,) = port.server._open
        open_._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        await request.respond(text_response("x" * 60_000))
        port.seen.append(request.target)

    port.server.answer = answer
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port.port))
        client.send(b"GET /k HTTP/1.1\r\nHost: a\r\n%b\r\n" % head)
        await wait_until(lambda: _has(port, 1), what="the response")
        if not head:
            (open_,) = port.server._open
            monkeypatch.setattr(connection, "SILENT_S", 0.0)
            open_._check_silence()
        await wait_until(lambda: _open(port, 0), what="the end of the connection")


async def test_chunks_in_http_1_0_end_the_connection(port: Port) -> None:
    """A proxy that speaks HTTP/1.0 may find another end of such a request (RFC 9112, 6.1)."""
    head = b"PUT /k HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = await port.answers(head + b"1\r\na\r\n0\r\n\r\nGET /behind HTTP/1.1\r\nHost: a\r\n\r\n")
    assert bodies_of(found) == [b"PUT /k 1 a\n"]
    assert b"Connection: close" in found


@on_both
async def test_client_may_disconnect_at_any_time(caplog: pytest.LogCaptureFixture) -> None:
    """A client that disconnects is not an error, and nothing is left of its connection."""

    async def wait_and_stream(request: HttpRequest) -> None:
        with suppress(ConnectionError, MalformedBody):
            await request.body.read()
        here.seen.append(request.target)
        await here.resume.wait()
        request.connection.send_continue()
        if request.target == "/stream":
            with suppress(ConnectionError):
                await request.stream({})
                while True:
                    await request.connection.send(b"x" * 10_000)
        else:
            await request.respond(text_response("late\n"))

    heads = [
        b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PUT /part HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\na",
    ]
    async with opened() as here:
        here.server.answer = wait_and_stream
        for is_reset in (False, True):
            for number, head in enumerate(heads):
                here.resume.clear()
                here.seen.clear()
                _, writer = await here.ask(head)
                await wait_until(lambda: _has(here, 1), what="the request")
                if is_reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                if is_reset and number != 1:
                    await wait_until(lambda: _open(here, 0), what="the reset is noticed")
                here.resume.set()
                await wait_until(lambda: _open(here, 0), what=f"the end of {head!r}")
                await wait_until(lambda: _is_idle(here), what="the end of the task")
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []


async def _is_idle(port: Port) -> bool:
    return not port.server._nursery._members
