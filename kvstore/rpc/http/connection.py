"""The connections of the HTTP port: HTTP/1.1 on the event loop, with the parser of httptools (llhttp, which is strict).

The requests of one connection are answered one after another. Bytes are parsed only up to the end of the request that
is answered next, so a client that sends many requests at once makes the node hold none of them. Everything that a
client can make a connection hold, or wait for, is bounded here, except for the body of a request, which its handler
bounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser

from kvstore.env.networks import KnownNetworks, network_of
from kvstore.env.nursery import TaskNursery
from kvstore.env.shares import Shares
from kvstore.env.turn_budget import TurnBudget
from kvstore.rpc.http.messages import Headers, HttpRequest, HttpResponse, MalformedBody, RequestBody, text_response

HEADER_BYTES_MAX = 16_380
"""Maximum size in bytes of the request's target, which may hold a key with every byte percent-encoded, and of each
header."""
HEADERS_MAX, HEADERS_BYTES_MAX = 128, 64 << 10
"""Maximum number and total size in bytes of the headers of a request, because they are read in one turn of the event
loop."""
PIECE_BYTES = 4 << 10
"""Maximum number of bytes that are parsed at once of a head, or of a body that comes in chunks."""
PIECES_MAX = 16
"""Maximum number of pieces of one connection that are parsed in one turn of the event loop. A client can make pieces of
a few bytes."""
TURN_BYTES, PIECE_WORK = 256 << 10, 256
"""Number of bytes of heads and of bodies in chunks that all connections together parse in one turn of the event loop,
and the number as which a piece counts in addition. A chunk of one byte takes six bytes, and 256 KiB of such chunks take
25 ms. If each connection had its own limit, 200 connections of one client held the event loop for more than a second.
"""
BODY_BUFFER_BYTES = 64 << 10
"""Reading pauses while a handler has not read more bytes than this of a body."""
ANSWERING_FACTOR = 2
"""A port answers at most this many requests for each connection that it may have. Some are of clients that are gone,
because an operation is not cancelled when its client disconnects."""
SILENT_S = 75.0
"""Seconds after which a connection without a complete request is closed."""
SEND_S = 30.0
"""Seconds within which the client must take a response."""
LINGER_S = 2.0
"""Seconds for which bytes that still arrive are dropped after the last response. If the connection were closed at
once, the client could lose that response."""
SHUTDOWN_S = 2.0
"""Seconds that requests in progress have to end when the port closes."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINE_END, _BLANK_LINE = b"\r\n", b"\r\n\r\n"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\nServer: kvstore\r\nDate: " for each in HTTPStatus}
_WITHOUT_BODY = frozenset((204, 304))

_log = logging.getLogger(__name__)


class HttpServer:
    """The HTTP connections of one port. Their number is limited."""

    def __init__(
        self, answer: Callable[[HttpRequest], Awaitable[None]], connections_max: int, known: KnownNetworks
    ) -> None:
        """`answer` responds to a request. A connection from one of the `known` networks is only closed in favor of a
        connection from another known network."""
        self.answer, self._connections_max = answer, connections_max
        self._idle: Shares[HttpConnection] = Shares(known)
        """Connections without a request in progress."""
        self._busy: Shares[HttpConnection] = Shares(known)
        """Connections with a request in progress."""
        self._open: set[HttpConnection] = set()
        self.turn = TurnBudget(TURN_BYTES)
        self._nursery = TaskNursery("http")
        self.answering = 0
        """Requests that are being answered, including those of clients that are gone."""
        self._quiet = asyncio.Event()
        """Set when no request is in progress any more, while the port closes."""
        self._date, self._dated_at = "", -1.0

    def __call__(self) -> HttpConnection:
        return HttpConnection(self)

    @property
    def date(self) -> str:
        """The date of a response that is sent now."""
        now = asyncio.get_running_loop().time()
        if now - self._dated_at >= 1:
            self._date, self._dated_at = formatdate(usegmt=True), now
        return self._date

    @property
    def is_full(self) -> bool:
        """True if no further request may be answered now."""
        return self.answering >= ANSWERING_FACTOR * self._connections_max

    def add(self, connection: HttpConnection) -> None:
        """Accept a connection. If there are too many, close the one that has been idle longest, of the network with
        the most idle ones."""
        self._open.add(connection)
        self._idle.add(connection, connection.network)
        if len(self._idle) + len(self._busy) > self._connections_max:
            gone = self._idle.first_to_go()
            if gone is connection:  # every other connection is busy
                gone = self._busy.displaced_by(connection.network) or connection
            assert gone is not None, "the new connection is idle"
            self.remove(gone)
            gone.abort()

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection that is closed."""
        self._open.discard(connection)
        self._idle.discard(connection)
        self._discard_busy(connection)

    def note_busy(self, connection: HttpConnection) -> None:
        """Record that a request of the connection is in progress."""
        if self._idle.discard(connection):
            self._busy.add(connection, connection.network)

    def note_idle(self, connection: HttpConnection) -> None:
        """Record that no request of the connection is in progress."""
        if self._discard_busy(connection):
            self._idle.add(connection, connection.network)

    def _discard_busy(self, connection: HttpConnection) -> bool:
        was_busy = self._busy.discard(connection)
        if was_busy and not self._busy:
            self._quiet.set()
        return was_busy

    def spawn(self, answering: Coroutine[Any, Any, None]) -> None:
        """Start to answer a request."""
        self._nursery.spawn(answering, name="request")

    async def close(self) -> None:
        """Close all connections. Requests in progress have SHUTDOWN_S seconds to end."""
        for connection in list(self._open):
            connection.stop()
        self._quiet.clear()
        if self._busy:
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_S):
                    await self._quiet.wait()
        await self._nursery.close()
        for connection in list(self._open):
            connection.abort()


class HttpConnection(asyncio.Protocol):
    """One connection. It parses a request, has it answered, and then parses the next one."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self.peer = self.network = "?"
        # what arrives
        self._parser = HttpRequestParser(self)
        self._unparsed, self._at = b"", 0
        """Bytes that have arrived, and how many of them are parsed."""
        self._is_reading = True
        self._is_in_message = False
        """True while the head or the body of a request is incomplete."""
        self._target = b""
        self._lines: dict[str, list[str]] = {}
        self._headers = 0
        self._head_bytes = 0
        """Bytes of the message that were parsed since its begin, or since its last piece of body."""
        self._body: RequestBody | None = None
        """The body that is arriving."""
        self._left = 0
        """Bytes of that body that have not arrived."""
        # what is answered
        self._next: HttpRequest | None = None
        """A request whose head is complete and that is not being answered yet."""
        self._current: HttpRequest | None = None
        """The request that is being answered."""
        self._is_broken = False
        """True if what arrives can no longer be parsed."""
        self._is_last = False
        """True if no further request will be answered."""
        self._has_ended = False
        """True once the last response has been sent or the connection is lost. Bytes that arrive are dropped."""
        self._is_chunked = False
        """True if the parts of the response are sent as chunks."""
        self._can_write = asyncio.Event()
        """Set while the client takes what is sent, and when it is gone."""
        self._can_write.set()
        self._silent_since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # ── the transport ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("?", 0))[0])
        self.network = network_of(self.peer)
        self._silent_since = self._loop.time()
        self._timer = self._loop.call_later(SILENT_S, self._check_silence)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._has_ended:
            self._unparsed, self._at = (self._unparsed[self._at :] + data if self._unparsed else data), 0
            self._parse()

    def eof_received(self) -> bool:
        """Return True, which keeps the connection open, if a response is still to be sent. TLS cannot be half open."""
        self._is_last = True
        if self._body is not None:
            self._body.fail(ConnectionResetError("the client has closed the connection"))
        is_awaited = self._current is not None and not self._has_ended
        return is_awaited and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.remove(self)
        self._has_ended = self._is_last = True
        self._unparsed, self._at = b"", 0
        if self._timer is not None:
            self._timer.cancel()
        if self._body is not None:
            self._body.fail(ConnectionResetError("the client has disconnected"))
        self.resume_writing()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _check_silence(self) -> None:
        silent_s = 0.0 if self._current is not None else self._loop.time() - self._silent_since
        if silent_s >= SILENT_S:
            self._end()
        else:
            self._timer = self._loop.call_later(SILENT_S - silent_s, self._check_silence)

    # ── parsing ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _parse(self) -> None:
        """Parse what has arrived, up to the end of the request that is answered next, and begin to answer it."""
        turn = self._server.turn
        for _ in range(PIECES_MAX):
            if self._at == len(self._unparsed) or self._is_broken or self._has_ended:
                break
            if not self._is_in_message and (self._current is not None or self._is_last):
                break
            if turn.is_used_up:
                turn.wait(self._parse)
                break
            is_bounded = self._body is not None and self._body.length is not None
            piece = self._next_piece()
            turn.take(PIECE_WORK + (0 if is_bounded else len(piece)))
            try:
                self._parser.feed_data(piece)
            except HttpParserUpgrade as upgrade:
                self._at -= len(piece) - upgrade.args[0]
                self._parse_without_upgrade()
            except HttpParserCallbackError:
                raise
            except HttpParserError as error:
                self._refuse(400, f"expected a request in HTTP/1.1, got something else: {error}")
            self._head_bytes += 0 if is_bounded else len(piece)
            if self._is_in_message and self._head_bytes > HEADERS_BYTES_MAX + HEADER_BYTES_MAX:
                self._refuse(431, f"expected at most {HEADERS_BYTES_MAX} bytes of headers, got {self._head_bytes}")
            if self._next is not None and self._server.is_full:
                self._refuse(503, "too many requests are being answered at this node; try again")
            elif self._next is not None:
                self._current, self._next = self._next, None
                self._server.note_busy(self)
                self._server.spawn(self._answer(self._current))
                self._server.answering += 1
        else:
            self._loop.call_soon(self._parse)
        if self._at == len(self._unparsed) or self._is_broken:
            self._unparsed, self._at = b"", 0
        if self._current is None and self._is_last and not self._is_in_message:
            self._end()
        self._read_or_pause()

    def _next_piece(self) -> bytes:
        """Return the bytes to parse next: a head or a part of a body. Bytes of the following request are never among
        them, because a head, and a body that comes in chunks, ends with a blank line. If the last piece ended within a
        blank line, only the rest of that line is returned."""
        data, at = self._unparsed, self._at
        if self._body is not None and self._body.length is not None:
            end = at + self._left
        elif data[at] in _LINE_END:
            piece = data[at : at + PIECE_BYTES]
            end = at + len(piece) - len(piece.lstrip(_LINE_END))
        else:
            end = at + PIECE_BYTES
            blank = data.find(_BLANK_LINE, at, end)
            end = end if blank < 0 else blank + len(_BLANK_LINE)
        self._at = min(end, len(data))
        return data if self._at - at == len(data) else data[at : self._at]

    def _parse_without_upgrade(self) -> None:
        """Parse the head of a request again, without its offer of another protocol. The port has no other protocol,
        but the parser takes the body for one. Java's client offers HTTP/2 with its first request."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "expected a request for this server, got CONNECT")
            return
        lines = [f"{name}: {value}" for name, values in self._lines.items() if name != "upgrade" for value in values]
        head = b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode())
        self._parser = HttpRequestParser(self)
        try:
            self._parser.feed_data(head + "\r\n".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape"))
        except HttpParserError as error:
            self._refuse(400, f"expected a request in HTTP/1.1, got something else: {error}")

    def on_message_begin(self) -> None:
        self._is_in_message = True
        self._target, self._lines, self._headers, self._head_bytes = b"", {}, 0, 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > HEADER_BYTES_MAX:
            self._refuse(400, f"expected a target of at most {HEADER_BYTES_MAX} bytes, got more")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body is not None:
            return  # a trailer
        if len(name) + len(value) > HEADER_BYTES_MAX:
            self._refuse(400, f"expected headers of at most {HEADER_BYTES_MAX} bytes each, got more")
        self._headers += 1
        if self._headers > HEADERS_MAX:
            self._refuse(431, f"expected at most {HEADERS_MAX} headers, got more")
            return
        key, text = name.decode("ascii").lower(), value.decode("utf-8", "surrogateescape")
        if key in self._lines:
            self._lines[key].append(text)
        else:
            self._lines[key] = [text]

    def on_headers_complete(self) -> None:
        parser, lines = self._parser, self._lines
        if self._is_broken or parser.should_upgrade():
            return
        size = sum(len(name) + len(value) for name, values in lines.items() for value in values)
        if size > HEADERS_BYTES_MAX:
            self._refuse(431, f"expected at most {HEADERS_BYTES_MAX} bytes of headers, got {size}")
            return
        version, hosts = parser.get_http_version(), len(lines.get("host", ()))
        # Proxies and servers that choose different names would answer different requests (RFC 9112, 3.2).
        if hosts > 1 or (not hosts and version == "1.1"):
            self._refuse(400, f"expected one Host header, got {hosts}")
            return
        length: int | None = int(lines["content-length"][0]) if "content-length" in lines else 0
        if "transfer-encoding" in lines:
            length = None
        # A proxy that speaks HTTP/1.0 may not know chunks, and find another end of the request (RFC 9112, 6.1).
        if not parser.should_keep_alive() or (length is None and version != "1.1"):
            self._is_last = True
        self._body, self._left = RequestBody(length, self._read_or_pause), length or 0
        method, target = parser.get_method().decode(), self._target.decode("utf-8", "surrogateescape")
        self._next = HttpRequest(method, target, Headers(lines), self._body, self, version)

    def on_body(self, data: bytes) -> None:
        if self._body is not None:
            self._head_bytes = 0
            self._left -= len(data)
            self._body.add(data)

    def on_message_complete(self) -> None:
        if self._body is not None:
            self._is_in_message = False
            self._body.complete()
            self._body = None

    def _refuse(self, status: int, message: str) -> None:
        """Stop parsing, because what arrives is not a request. If it is the body of the request that is being answered,
        the handler that reads it gets an error. Otherwise the client gets a response."""
        if self._is_broken:
            return
        self._is_broken = self._is_last = True
        self._next = None
        if self._current is None:
            self._write(self._encoded("", "1.1", text_response(f"{status}: {message}\n", status)))
            self._end()
        elif self._body is not None:
            self._body.fail(MalformedBody(message))

    def _read_or_pause(self) -> None:
        """Read only as fast as requests are answered and bodies are read."""
        unread = 0 if self._body is None else self._body.unread
        wants_more = self._has_ended or (self._at == len(self._unparsed) and unread <= BODY_BUFFER_BYTES)
        if wants_more != self._is_reading and not self._transport.is_closing():
            self._is_reading = wants_more
            if wants_more:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # ── answering ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer(self, request: HttpRequest) -> None:
        try:
            await self._server.answer(request)
        except Exception:  # noqa: BLE001  # of any kind: the client gets a response
            _log.exception("failed to answer a request", extra={"method": request.method})
            if request.status:
                self.abort()
            else:
                await request.respond(text_response("500: internal error\n", 500))
        finally:
            self._finish(request)

    def _finish(self, request: HttpRequest) -> None:
        """Continue with the next request."""
        self._current = None
        self._server.answering -= 1
        self._silent_since = self._loop.time()
        self._server.note_idle(self)
        if not request.status:  # its handler was cancelled: the client would take the next response for this one
            self.abort()
        if self._is_chunked:
            self._write(b"0\r\n\r\n")
        self._is_chunked = False
        if request.body.is_complete:
            self._parse()
        else:
            self._end()

    def _end(self) -> None:
        """Close the connection after its last response. A client that does not take that response is disconnected."""
        if self._has_ended:
            return
        self._has_ended = self._is_last = True
        self._unparsed, self._at = b"", 0
        assert self._timer is not None, "the connection was made"
        self._timer.cancel()
        if not (self._is_in_message or self._is_broken):
            self._timer = self._loop.call_later(SEND_S, self.abort)
            self._transport.close()
            return
        self._timer = self._loop.call_later(LINGER_S, self.abort)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            with suppress(OSError):  # the client has reset the connection
                self._transport.write_eof()
        self._read_or_pause()

    def stop(self) -> None:
        """Close the connection, at once or after the request in progress."""
        self._is_last = True
        if self._current is None:
            self._end()

    def abort(self) -> None:
        self._has_ended = True
        self._transport.abort()

    @property
    def certificate(self) -> Any:
        return self._transport.get_extra_info("peercert")

    def send_continue(self) -> None:
        self._write(CONTINUE)

    async def respond(self, request: HttpRequest, response: HttpResponse) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._encoded(request.method, request.version, response, request.body.is_complete))
        if not self._can_write.is_set():
            try:
                async with asyncio.timeout(SEND_S):
                    await self._can_write.wait()
            except TimeoutError:
                self.abort()

    async def stream(self, request: HttpRequest, headers: Mapping[str, str]) -> None:
        self._is_chunked = request.version == "1.1"
        if not self._is_chunked:
            self._is_last = True  # only the end of the connection shows the end of the response
        lines = {**headers, **({"Transfer-Encoding": "chunked"} if self._is_chunked else {})}
        self._write(self._head(200, request.version, lines, request.body.is_complete))
        await self._taken()

    async def send(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        await self._taken()

    def _write(self, data: bytes) -> None:
        """Send bytes. Does nothing if the client is gone, because some event loops raise an error then."""
        if not self._transport.is_closing():
            self._transport.write(data)

    async def _taken(self) -> None:
        """Wait until the client can take more. Raises ConnectionError."""
        await self._can_write.wait()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has disconnected")

    def _encoded(self, method: str, version: str, response: HttpResponse, is_complete: bool = True) -> bytes:
        status, body, headers, content_type = response
        lines = {**headers}
        if status not in _WITHOUT_BODY:
            lines["Content-Type"] = content_type
            lines.setdefault("Content-Length", str(len(body)))
        return self._head(status, version, lines, is_complete) + (b"" if method == "HEAD" else body)

    def _head(self, status: int, version: str, headers: Mapping[str, str], is_complete: bool) -> bytes:
        """Return the head of a response. The connection ends after it if the request's body is not complete, also if
        the rest arrives before the response has ended: a client sends what follows again (RFC 9112, 9.6)."""
        text = f"{_STATUS_LINES[status]}{self._server.date}\r\n"
        for name, value in headers.items():
            text += f"{name}: {value}\r\n"
        self._is_last = self._is_last or not is_complete
        if self._is_last:
            text += "Connection: close\r\n"
        elif version == "1.0":
            text += "Connection: keep-alive\r\n"
        return f"{text}\r\n".encode("utf-8", "surrogateescape")
