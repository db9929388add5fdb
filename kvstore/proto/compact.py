"""The compact form of nearly all frames and answers of a session stream, in MessagePack, which costs a sixth of
protobuf in Python. The fields are those of kv.proto, with the same names, so that readers can treat both alike.

    frame   := [ring_version, timeout_ms, [lane …]]
    lane    := [partition, first, [code …], [key …], level, token, [value …], [sequence …], client,
                first_unacknowledged, seen_ms]
    answers := [ring_version, [[partition, sequence, time_ms] …], [number …], [version …], [found …], [record …],
                [absent …]]
    record  := [value, version, created, written_ms, expires_ms]

Messages with options, results or failures are sent as protobuf. The test of this module has golden bytes.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder

R = TypeVar("R", bound=tuple[bytes, int, int, int, int])
_Count = Annotated[int, Meta(ge=0)]
_OPERATION_BYTES = 16


class CompactLane(Struct, array_like=True, forbid_unknown_fields=True):
    """The operations of a frame that go to one partition under one identity."""

    partition: str
    first: _Count
    codes: list[_Count]
    keys: list[bytes]
    level: _Count = 0
    token: _Count = 0
    values: list[bytes] = []
    """May be left out if all are empty."""
    sequences: list[_Count] = []
    """May be left out if all are 0."""
    client: bytes = b""
    first_unacknowledged: _Count = 0
    seen_ms: _Count = 0
    options: ClassVar[tuple[()]] = ()

    def ByteSize(self) -> int:  # protobuf's name for it
        """Return the approximate size in bytes."""
        return sum(map(len, self.keys)) + sum(map(len, self.values)) + _OPERATION_BYTES * len(self.codes)


class CompactFrame(Struct, array_like=True, forbid_unknown_fields=True):
    """A frame of operations in the compact, columnar encoding."""

    ring_version: _Count
    timeout_ms: _Count
    lanes: list[CompactLane]


class CompactProgress(Struct, array_like=True, forbid_unknown_fields=True):
    """How far a partition has applied its log."""

    partition: str
    sequence: _Count
    time_ms: _Count


class CompactAnswers(Struct, Generic[R], array_like=True, forbid_unknown_fields=True):
    """The answers to operations. Every operation's number occurs exactly once, in `numbers`, `found` or `absent`."""

    ring_version: _Count
    progress: list[CompactProgress]
    numbers: list[_Count]
    versions: list[_Count]
    found: list[_Count]
    records: list[R]
    absent: list[_Count]


encode = Encoder().encode
decode_frame = Decoder(CompactFrame).decode
"""Decode a frame. Raises msgspec.MsgspecError."""


def decoder_of_answers(record: type[R]) -> Any:
    """Make a function that decodes answers whose records become `record`. The function raises msgspec.MsgspecError."""
    return Decoder(CompactAnswers[record]).decode  # type: ignore[valid-type]
