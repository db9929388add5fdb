"""The messages between servers, as bytes. Decides only. Its test has golden bytes.

    stream  := frame*
    frame   := length u32 big endian | body
    body    := MessagePack of one of the arrays below, its kind first

Each side of a link decodes with types and bounds (lengths, codes, counts) before it acts. Anything else raises
FrameError and ends the link. From link version 3 on, unknown trailing fields are ignored: new fields come last, have a
default, and are sent only on such links (docs/protocol.md V3). Columns keep thousands of operations to a few
microseconds: the common operations are decoded directly into the tuples that partitions take.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder, Ext

from kvstore import errors
from kvstore.errors import InvalidRequest, OutcomeUnknown, StoreError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.partition.state.commands import Code, Op, RequestId
from kvstore.partition.state.traits import IN_BATCH, KEYLESS

FRAME_BYTES_MAX = 32 << 20
HEADER = struct.Struct(">I")
BODY_BYTES_MAX = 8 << 20
"""Maximum size in bytes of the body of a call between replicas and of its answer."""

_Key = Annotated[bytes, Meta(min_length=1, max_length=KEY_BYTES_MAX)]
_Value = Annotated[bytes, Meta(max_length=VALUE_BYTES_MAX)]
_Id = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Level = Annotated[int, Meta(ge=0, le=3)]
_Get = tuple[Literal[1], _Key, _Level, int]
_Put = tuple[Literal[3], _Key, _Value, int, int, int, RequestId | None]
_ERROR_EXT = 1


class Lane(Struct, array_like=True):
    """Operations on one partition, with the sender's numbers."""

    partition: _Name
    gets: list[tuple[_Id, _Get]] = []
    puts: list[tuple[_Id, _Put]] = []
    others: list[tuple[_Id, tuple[Any, ...]]] = []

    def in_order(self) -> tuple[list[tuple[int, Op]], list[tuple[int, InvalidRequest]]]:
        """Return all operations in the order of their submission, and the errors of operations of the rarer kinds
        that are invalid."""
        if not self.puts and not self.others:
            return self.gets, []
        good: list[tuple[int, Op]] = [*self.gets, *self.puts]
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
    heard: _Id = 0
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

_INT, _BYTES = int, bytes
_SHAPES: dict[int, tuple[type, ...]] = {
    Code.GET: (_INT, _BYTES, _INT, _INT),
    Code.META: (_INT, _BYTES, _INT, _INT),
    Code.PUT: (_INT, _BYTES, _BYTES, _INT, _INT, _INT, object),
    Code.DELETE: (_INT, _BYTES, _INT, _INT, object),
    Code.INCREMENT: (_INT, _BYTES, _INT, object),
    Code.APPEND: (_INT, _BYTES, _BYTES, object),
    Code.EXPIRE: (_INT, _BYTES, _INT, _INT, object),
    Code.BATCH: (_INT, _BYTES, tuple, _INT, object),
    Code.DELETE_RANGE: (_INT, _BYTES, _BYTES, object),
    Code.SCAN: (_INT, _BYTES, _BYTES, _INT, _INT, _INT, _INT),
    Code.RANGE: (_INT, _BYTES, _BYTES, _INT, _INT, _INT, _INT),
    Code.SCAN_TOKENS: (_INT, _INT, _INT, _INT, _INT),
    Code.COUNT: (_INT, _BYTES, _INT),
    Code.CHECK: (_INT, _BYTES, _INT, _INT, object),
}
_RANGES = frozenset((int(Code.SCAN), int(Code.RANGE)))
"""Operations on ranges. A range may begin one byte beyond the longest key."""
_WITH_REQUEST = frozenset(code for code, shape in _SHAPES.items() if object in shape)


def restored(op: tuple[Any, ...]) -> Op:
    """Return an operation of a rarer kind in the form that partitions accept: nested arrays become tuples, and the
    request id becomes a RequestId. Raises FrameError if it is not a valid operation."""
    if not op:
        raise FrameError("expected an operation, got an empty array")
    code = op[0]
    if code in _WITH_REQUEST and op[-1] is not None:
        op = (*op[:-1], _request(op[-1]))
    if code == Code.BATCH and len(op) > 2 and isinstance(op[2], list):
        ops = tuple(restored(tuple(each)) for each in op[2] if isinstance(each, list))
        if len(ops) != len(op[2]) or any(each[0] not in IN_BATCH for each in ops):
            raise FrameError("expected only operations that a batch allows")
        op = (*op[:2], ops, *op[3:])
    check_op(op)
    return op


def check_op(op: tuple[Any, ...]) -> None:
    """Raise FrameError unless `op` has the shape of an operation and stays within its bounds."""
    shape = _SHAPES.get(op[0]) if op and type(op[0]) is int else None
    if shape is None or not len(shape) - (op[0] == Code.SCAN_TOKENS) <= len(op) <= len(shape):
        raise FrameError("expected a known operation")
    for value, kind in zip(op, shape, strict=False):
        if kind is object:
            if value is not None and type(value) is not RequestId:
                raise FrameError(f"operation {op[0]}: malformed request id")
        elif type(value) is not kind:
            raise FrameError(f"operation {op[0]}: expected {kind.__name__}, got {type(value).__name__}")
    if op[0] == Code.SCAN_TOKENS:
        return
    if not (0 if op[0] in KEYLESS else 1) <= len(op[1]) <= KEY_BYTES_MAX + (op[0] in _RANGES):
        raise FrameError(f"operation {op[0]}: invalid key length of {len(op[1])} bytes")
    if len(op) > 2 and type(op[2]) is bytes and len(op[2]) > VALUE_BYTES_MAX:
        raise FrameError(f"operation {op[0]}: invalid value length of {len(op[2])} bytes")


def _request(fields: Any) -> RequestId:
    try:
        return msgspec.convert(fields, RequestId)
    except msgspec.ValidationError as error:
        raise FrameError(f"malformed request id: {error}") from error


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
