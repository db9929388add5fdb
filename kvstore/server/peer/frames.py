"""The messages between servers, as bytes. Decides only. Its test has golden bytes.

    stream  := frame*
    frame   := length u32 big endian | body
    body    := MessagePack of one of the arrays below, its kind first

Each side of a link decodes with types and bounds (lengths, codes, counts) before it acts. Anything else raises
FrameError and ends the link. From link version 3 on, unknown trailing fields are ignored: new fields come last, have a
default, and are sent only on such links (docs/protocol.md V3). Columns keep thousands of operations to a few
microseconds: the common operations are decoded directly into the classes that partitions take.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

from kvstore import errors
from kvstore.errors import InvalidRequest, OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Get, Op, Put
from kvstore.partition.state.traits import IN_BATCH

FRAME_BYTES_MAX = 32 << 20
HEADER = struct.Struct(">I")
BODY_BYTES_MAX = 8 << 20
"""Maximum size in bytes of the body of a call between replicas and of its answer."""

_Id = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_ERROR_EXT = 1


class Lane(Struct, array_like=True):
    """Operations on one partition, with the sender's numbers."""

    partition: _Name
    gets: list[tuple[_Id, Get]] = []
    puts: list[tuple[_Id, Put]] = []
    others: list[tuple[_Id, Any]] = []
    """Operations of the rarer kinds. The receiver decodes them one by one, so that it refuses only those that are
    malformed or that it does not know."""

    def in_order(self) -> tuple[list[tuple[int, Op]], list[tuple[int, InvalidRequest]]]:
        """Return all operations in the order of their submission, and the errors of operations of the rarer kinds
        that are invalid."""
        good: list[tuple[int, Op]] = [*self.gets, *self.puts]
        if not self.puts and not self.others:
            return good, []
        bad: list[tuple[int, InvalidRequest]] = []
        for number, op in self.others:
            try:
                good.append((number, restored(op)))
            except FrameError as error:
                bad.append((number, InvalidRequest(str(error))))
        good.sort(key=operator.itemgetter(0))
        return good, bad


class Operations(Struct, array_like=True, tag=1):
    """Operations that clients sent to the sender and that the receiver leads."""

    ring_version: int
    lanes: list[Lane]
    received: _Id = 0
    """Number of result frames that the sender had received. Operations that were sent before the sender received a
    refusal are refused too, so that a partition's operations are executed in the order in which they reached the
    sender."""


class Results(Struct, array_like=True, tag=2):
    """Results of operations, in any order."""

    numbers: list[tuple[_Id, int]] = []
    """Operations whose result is a number (a version or a sequence)."""
    records: list[tuple[_Id, tuple[bytes, int, int, int, int]]] = []
    absent: list[_Id] = []
    others: list[tuple[_Id, Any]] = []
    progress: list[tuple[_Name, int, int]] = []
    """(partition, sequence, time) for each partition. It is at least as high as the progress of any result in this
    frame."""


class Call(Struct, array_like=True, tag=3):
    """A call from one replica of a partition to another replica."""

    number: _Id
    partition: _Name
    method: _Name
    body: Annotated[bytes, Meta(max_length=BODY_BYTES_MAX)]


class Answer(Struct, array_like=True, tag=4):
    """The answer to a Call: bytes, or an error."""

    number: _Id
    body: Annotated[bytes, Meta(max_length=BODY_BYTES_MAX)] = b""
    error: Any = None


class Ping(Struct, array_like=True, tag=5):
    """Shows that the sender is alive. The receiver echoes it."""

    number: _Id


class Goodbye(Struct, array_like=True, tag=6):
    """Asks the other side to send no more operations, and to close the link when all of its operations are answered."""


Message = Operations | Results | Call | Answer | Ping | Goodbye


class FrameError(Exception):
    """Raised if a peer sent bytes that are not a valid frame of this protocol."""


def encode(message: Message) -> bytes:
    """Return the frame of a message. Raises FrameError if it exceeds the maximum size."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise FrameError(f"expected a frame of at most {FRAME_BYTES_MAX} bytes, got {len(body)}")
    return HEADER.pack(len(body)) + body


def _decoded(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise FrameError(f"malformed: {error}") from error


class Frames:
    """Splits a stream of bytes into frames. Buffers at most one incomplete frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = HEADER.size

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add received bytes and yield the messages that they complete. Raises FrameError for a malformed frame or
        one that is too long."""
        size = len(data)
        may_be_one = not self._size and HEADER.size <= size <= FRAME_BYTES_MAX
        if may_be_one and HEADER.unpack_from(data)[0] == size - HEADER.size:  # the common case
            yield _decoded(data[HEADER.size :])
            return
        self._parts.append(data)
        self._size += size
        if self._size < self._needed:
            return
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        at, size = 0, len(data)
        while True:
            if size - at < HEADER.size:
                self._needed = HEADER.size
                break
            (length,) = HEADER.unpack_from(data, at)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"expected a frame of at most {FRAME_BYTES_MAX} bytes, got {length}")
            end = at + HEADER.size + length
            if end > size:
                self._needed = end - at
                break
            yield _decoded(data[at + HEADER.size : end])
            at = end
        self._parts = [data[at:]] if at < size else []
        self._size = size - at


# ── the rarer operations ──────────────────────────────────────────────────────────────────────────────────────────────


def restored(fields: Any) -> Op:
    """Return the operation with these fields. Raises FrameError if they are not a valid operation."""
    try:
        op: Op = msgspec.convert(fields, Op, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise FrameError(f"malformed operation: {error}") from error
    if any(each.code not in IN_BATCH for each in op.ops):
        raise FrameError("expected only operations that a batch or a transaction allows")
    return op


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_ERRORS: dict[str, type[StoreError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, StoreError)
}


def _encode_error(value: Any) -> Ext:
    if not isinstance(value, StoreError):
        raise TypeError(f"cannot send a {type(value).__name__}")
    arguments = [each if isinstance(each, str | int) else str(each) for each in value.args]
    return Ext(_ERROR_EXT, msgspec.msgpack.encode([type(value).__name__, *arguments]))


def _decode_error(code: int, data: memoryview) -> StoreError:
    if code != _ERROR_EXT:
        raise ValueError(f"unknown extension {code}")
    name, *arguments = _error_decoder.decode(data)
    cls = _ERRORS.get(str(name))
    if cls is None:
        # An error of a newer server: its meaning for the operation is unknown here.
        return OutcomeUnknown(f"{name}: {arguments}")
    return cls(*arguments)


_error_decoder = Decoder(list[str | int])
_encoder = Encoder(enc_hook=_encode_error)
_decoder: Decoder[Message] = Decoder(Message, ext_hook=_decode_error)
