"""Messages between the users of a process and its sidecar. Decides only.

    message := length u32 big-endian | msgpack

Both ends run the same build and live equally long, so there is no version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = Struct(">I")
BYTES_MAX = 1 << 30
STARTED, OPENED = -1, 0
"""Numbers of results that belong to no call: the sidecar has started; it has found the cluster, or failed to."""
T = TypeVar("T")


class CallRequest(msgspec.Struct, array_like=True):
    """One call of a user."""

    number: int
    call: str
    """get, put or scan."""
    key: bytes
    end: bytes = b""
    value: bytes = b""
    if_version: int | None = None
    limit: int = 0
    level: int = 0


class CallResult(msgspec.Struct, array_like=True):
    """The result of one call, with the wall-clock times when its request was sent and its reply was received."""

    number: int
    sent: float
    received: float
    items: list[tuple[bytes, bytes, int]] = []
    """Keys with values and versions; for a put only the version."""
    error: tuple[str, str, dict[str, str]] | None = None
    """The error, as kvstore.rpc.status describes it."""


class CallResults(msgspec.Struct, array_like=True):
    """Results that have arrived, with the processor time that the sidecar has used and waited for, in seconds."""

    results: list[CallResult]
    processor_s: float
    queued_s: float | None


class Messages(Generic[T]):
    """Splits a stream of bytes into messages."""

    def __init__(self, kind: Any) -> None:
        """Decode each message as `kind`, which is T and may be a union."""
        self._decode: Callable[[bytes], T] = msgspec.msgpack.Decoder(kind).decode
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        self._data += data
        at = 0
        while len(self._data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, at)
            assert size <= BYTES_MAX, f"a message of {size} bytes"
            end = at + _LENGTH.size + size
            if len(self._data) < end:
                break
            yield self._decode(memoryview(self._data)[at + _LENGTH.size : end].tobytes())
            at = end
        del self._data[:at]


_encode = msgspec.msgpack.Encoder().encode


def message(body: Any) -> bytes:
    data = _encode(body)
    return _LENGTH.pack(len(data)) + data
