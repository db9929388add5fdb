"""The connections that carry a link's frames to its server: a stream on the server's Redis port, or a gRPC session if
the server has no streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from msgspec import MsgspecError

from kvstore.client.core.values import Item
from kvstore.env.ports import Nursery, Stream, Transport
from kvstore.errors import NotAuthenticated
from kvstore.proto import compact, kv_pb2, kv_pb2_grpc
from kvstore.proto.frames import FrameReader
from kvstore.proto.session_stream import COMPACT, LINE_MAX, PROTOBUF, WELCOME, hello, message_of, protobuf_message_of
from kvstore.rpc.channels import MESSAGE_BYTES_MAX
from kvstore.rpc.login import Login
from kvstore.rpc.status import connection_fault, from_rpc_error

FAILURES = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError, EOFError)
"""Errors with which gRPC calls fail."""
OUTPUT_HIGH_BYTES = 256 << 10
"""Bytes of frames that the server has not accepted yet; above this, operations wait in the link."""


_decode = compact.decoder_of_answers(Item)

AnyFrame = kv_pb2.Frame | compact.CompactFrame
AnyAnswers = kv_pb2.Answers | compact.CompactAnswers[Item]


class ConnectionOwner(Protocol):
    """The link that owns a connection."""

    def take(self, answers: AnyAnswers) -> None:
        """Take a message of answers."""
        ...

    def flush(self) -> None:
        """Send the next frame, because the connection is ready again."""
        ...

    def disconnect(self, why: str) -> None:
        """Handle the end of the connection."""
        ...


class FrameConnection(Protocol):
    """The connection over which a link sends its frames."""

    is_compact: bool
    """True if it takes compact frames, which cost so little that few operations need no batching delay."""
    is_ready: bool
    """True if another frame may be sent."""

    def send(self, message: AnyFrame) -> None: ...
    def probe(self) -> Awaitable[object] | None:
        """Request a sign of life: an answer on the connection, or an awaitable."""
        ...

    def close(self) -> None: ...


class StreamConnection:
    """A session on the Redis port (kvstore/proto/session_stream.py), as the protocol of its connection."""

    is_compact = True

    def __init__(self, owner: ConnectionOwner, server: str, login: Login | None = None) -> None:
        self.is_ready = False
        self._owner, self._server, self._login = owner, server, login
        self._frames = FrameReader(MESSAGE_BYTES_MAX)
        self._line = b""
        self._is_open = False
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream: Stream | None = None

    async def open(self, transport: Transport, address: str) -> None:
        """Open the session. Raises OSError, and EOFError if the other side offers no sessions. The caller sets the
        deadline."""
        try:
            await transport.connect(address, self)
            await self._opened
        except BaseException:
            self.close()
            raise

    def send(self, message: AnyFrame) -> None:
        assert self._stream is not None, "a connection is opened before anything is sent"
        is_compact = message.__class__ is compact.CompactFrame
        self._stream.write(message_of(message) if is_compact else protobuf_message_of(message))  # type: ignore[arg-type]

    def probe(self) -> None:
        """Send an empty frame, which the server answers."""
        self.send(compact.CompactFrame(0, 0, []))

    def close(self) -> None:
        self._lose("closed")
        if self._stream is not None:
            self._stream.abort()

    # ── the protocol ──

    def connection_made(self, transport: Any) -> None:
        self._stream = transport
        transport.set_write_buffer_limits(high=OUTPUT_HIGH_BYTES)
        login = self._login
        transport.write(hello(self._server, *(() if login is None else (login.user.encode(), login.password))))

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            return self._greet(data)
        take, frames = self._owner.take, self._frames
        try:
            for body in frames.feed(data):
                kind = body[0] if body else 0
                if kind == COMPACT:
                    take(_decode(memoryview(body)[1:]))
                elif kind == PROTOBUF:
                    take(kv_pb2.Answers.FromString(body[1:]))
                else:
                    return self._owner.disconnect(f"expected answers, got a message of kind {kind}")
        except (DecodeError, MsgspecError) as error:
            return self._owner.disconnect(f"no answers: {error}")
        if frames.fault:
            self._owner.disconnect(frames.fault)

    def _greet(self, data: bytes) -> None:
        self._line += data
        if self._opened.done():
            return  # it was closed meanwhile
        if self._line == WELCOME:
            self.is_ready = self._is_open = True
            self._opened.set_result(None)
        elif b"\n" in self._line or len(self._line) > LINE_MAX:
            self._lose(self._line[:LINE_MAX].decode("utf-8", "replace").strip())

    def eof_received(self) -> bool | None:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc or "the server ended the session"))

    def pause_writing(self) -> None:
        self.is_ready = False

    def resume_writing(self) -> None:
        self.is_ready = True
        self._owner.flush()

    def _lose(self, why: str) -> None:
        self.is_ready = False
        if self._is_open:
            self._is_open = False
            self._owner.disconnect(why)
        elif not self._opened.done():
            self._opened.set_exception(EOFError(why))
            self._opened.exception()  # the caller may have gone


class GrpcConnection:
    """A gRPC session stream. One task writes frames, one at a time, and another reads answers."""

    is_compact = False

    def __init__(self, owner: ConnectionOwner, stub: kv_pb2_grpc.KVStub, nursery: Nursery, silence_s: float) -> None:
        self.is_ready = False
        self._owner, self._nursery, self._silence_s = owner, nursery, silence_s
        self._stub: Any = stub
        self._call: Any = None
        self._next: kv_pb2.Frame | None = None
        self._wake = asyncio.Event()
        self._is_closed = False

    async def open(self) -> None:
        """Open the session. Raises gRPC errors. The caller sets the deadline."""
        self._call = self._stub.Session()
        await self._call.wait_for_connection()
        await self._call.initial_metadata()
        self.is_ready = True
        self._nursery.spawn(self._write(), name="frames")
        self._nursery.spawn(self._read(), name="answers")

    def send(self, message: AnyFrame) -> None:
        assert isinstance(message, kv_pb2.Frame), "gRPC carries protobuf"
        self.is_ready = False
        self._next = message
        self._wake.set()

    def probe(self) -> Awaitable[object]:
        """Probe on the same connection, because a stopped process keeps its connections open."""
        answer: Awaitable[object] = self._stub.Topology(kv_pb2.TopologyRequest(), timeout=self._silence_s)
        return answer

    def close(self) -> None:
        self._is_closed = True
        self.is_ready = False
        self._wake.set()
        if self._call is not None:
            self._call.cancel()

    async def _write(self) -> None:
        try:
            while not self._is_closed:
                self._wake.clear()
                if self._next is not None:
                    message, self._next = self._next, None
                    await self._call.write(message)
                    self.is_ready = not self._is_closed
                    self._owner.flush()
                else:
                    await self._wake.wait()
        except Exception as error:  # noqa: BLE001  # the root of a task: a connection without its tasks is useless
            self._owner.disconnect(text_of(error))

    async def _read(self) -> None:
        try:
            while not self._is_closed:
                answers = await self._call.read()
                if not isinstance(answers, kv_pb2.Answers):
                    raise EOFError("the server ended the session")
                self._owner.take(answers)
        except Exception as error:  # noqa: BLE001  # the root of a task: a connection without its tasks is useless
            self._owner.disconnect(text_of(error))


def login_error_or_none(error: BaseException) -> NotAuthenticated | None:
    """Return the login error of a failed call, or None. After a login error no other kind of connection can help."""
    found = from_rpc_error(error) if isinstance(error, grpc.RpcError) else None
    return found if isinstance(found, NotAuthenticated) else None


def text_of(error: BaseException) -> str:
    """Return the text of the error that ended a connection."""
    if isinstance(error, grpc.RpcError):
        text, plain = str(error.details()), connection_fault(str(error.details()))
        return f"{error.code().name}: {text}" if plain == text else plain
    words = error.strerror if isinstance(error, OSError) else None  # without the number
    return words or str(error) or type(error).__name__
