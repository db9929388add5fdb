"""HTTP requests and responses, as the pages and the gateway of a node use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, unquote

TEXT = "text/plain; charset=utf-8"
_NO_HEADERS: Mapping[str, str] = {}


class HttpResponse(NamedTuple):
    """A response with its whole body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = _NO_HEADERS
    """Headers in addition to those that every response has."""
    content_type: str = TEXT


def text_response(text: str, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> HttpResponse:
    """Return a response with plain text."""
    return HttpResponse(status, text.encode(), headers)


class MalformedBody(Exception):
    """The body of a request breaks the rules of HTTP, so its end is unknown."""


class Headers:
    """The headers of a request. Names are matched without regard to case."""

    __slots__ = ("lines",)

    def __init__(self, lines: dict[str, list[str]] | None = None) -> None:
        self.lines = {} if lines is None else lines
        """The values of each name in lower case, in the order in which they arrived."""

    def get(self, name: str) -> str | None:
        """Return the first value of a header, or None if the request does not have it."""
        lines = self.lines.get(name.lower())
        return None if lines is None else lines[0]

    def all(self, name: str) -> list[str]:
        """Return all values of a header."""
        return self.lines.get(name.lower(), [])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield each name in lower case with each of its values."""
        return ((name, value) for name, values in self.lines.items() for value in values)


class RequestBody:
    """The body of a request, while it arrives."""

    __slots__ = ("_arrived", "_failure", "_resume", "_waiter", "is_complete", "length", "unread")

    def __init__(self, length: int | None, resume: Callable[[], None]) -> None:
        """`length` is the announced length in bytes, or None if the body comes in chunks. `resume` is called after each
        read."""
        self.length = length
        self.unread = 0
        """Bytes that have arrived and have not been read."""
        self.is_complete = False
        self._arrived: list[bytes] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._resume = resume

    @property
    def exists(self) -> bool:
        """True if the request announced a body."""
        return self.length != 0

    async def read(self) -> bytes:
        """Return the bytes that have arrived since the last call; wait if there are none. Returns no bytes at the end.
        Raises ConnectionError if the client disconnects, MalformedBody."""
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            if self.is_complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._arrived[0] if len(self._arrived) == 1 else b"".join(self._arrived)
        self._arrived.clear()
        self.unread = 0
        self._resume()
        return data

    def add(self, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._arrived.append(data)
        self.unread += len(data)
        self._wake()

    def complete(self) -> None:
        """Mark the body as complete."""
        self.is_complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Report to the reader that the rest of the body will never arrive."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(Protocol):
    """The connection of a request. Implemented by kvstore.rpc.http.connection.HttpConnection."""

    @property
    def peer(self) -> str:
        """The client's address, or `?`."""
        ...

    @property
    def certificate(self) -> Any:
        """The certificate that the client presented and the handshake verified, as `ssl` returns it; otherwise None."""
        ...

    def send_continue(self) -> None:
        """Tell a client that waits for permission to send the body."""
        ...

    async def respond(self, request: HttpRequest, response: HttpResponse) -> None:
        """Send a response. Returns when the client has taken it or is gone. Aborts a connection whose client takes
        nothing."""
        ...

    async def stream(self, request: HttpRequest, headers: Mapping[str, str]) -> None:
        """Send the head of a response of unknown length. Raises ConnectionError."""
        ...

    async def send(self, data: bytes) -> None:
        """Send a part of a streamed response. Returns when the client can take more. Raises ConnectionError."""
        ...

    def abort(self) -> None:
        """Close the connection at once, without sending what waits to be sent."""
        ...


class HttpRequest:
    """A request whose head has arrived."""

    __slots__ = ("body", "connection", "headers", "method", "status", "target", "version")

    def __init__(
        self, method: str, target: str, headers: Headers, body: RequestBody, connection: Connection, version: str
    ) -> None:
        """`target` is the request target as received: neither decoded nor normalised. `version` is 1.1 or 1.0."""
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.connection, self.version = connection, version
        self.status = 0
        """Status of the response; 0 until it has begun."""

    @property
    def path(self) -> str:
        """The decoded path, by which pages are found. The gateway reads the target itself, because a key may contain
        any byte."""
        return unquote(path_and_query(self.target)[0])

    def parameter(self, name: str) -> str:
        """Return the first value of a query parameter, or an empty string."""
        return parse_qs(path_and_query(self.target)[1]).get(name, [""])[0]

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case and without parameters; `application/octet-stream` by default."""
        given = self.headers.get("content-type")
        return given.partition(";")[0].strip().lower() if given else "application/octet-stream"

    @property
    def remote(self) -> str:
        """The client's address, or `?`."""
        return self.connection.peer

    async def respond(self, response: HttpResponse) -> None:
        """Send the response. Returns when the client has taken it or is gone."""
        self.status = response.status
        await self.connection.respond(self, response)

    async def stream(self, headers: Mapping[str, str]) -> None:
        """Begin a response with status 200 whose parts `connection.send` sends. It ends with the handler. Raises
        ConnectionError."""
        self.status = 200
        await self.connection.stream(self, headers)


def path_and_query(target: str) -> tuple[str, str]:
    """Split the target of a request into the path and the query. The target is used as received and may begin with
    the server's name."""
    if not target.startswith("/") and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    return path, query
