"""The contents of the control records about token ranges: values ↔ the `control` bytes of an entry. Decides only.

docs/reference/formats.md (Records of moves) has every field, docs/protocol.md (Moving a range) their purpose. Bytes are
MessagePack: an array of the fields in the order in which they stand here. DO NOT CHANGE the order; new fields come
last, have a default, and change nothing for readers that pass them over (docs/protocol.md V5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvstore.errors import Corrupted
from kvstore.partition.state.entry import Kind
from kvstore.partition.state.marks import Mark
from kvstore.partition.state.tokens import Span
from kvstore.proto.arrays import ArrayDecoder
from kvstore.types import PartitionId, Position


class Founded(NamedTuple):
    """In an epoch-start record: what the partition owns from its first record on."""

    spans: tuple[Span, ...]


class ImportBegin(NamedTuple):
    """The target begins to copy a range, from nothing."""

    move: int
    attempt: int
    source: PartitionId
    span: Span
    pin: Position
    """The source's log is followed from behind this entry on, and held from its ledger on."""


class ImportRows(NamedTuple):
    """Rows of the source's, as they are there. Takes one sequence, so that request ids can come along."""

    move: int
    keys: list[bytes]
    """Record keys (rows.data_key)."""
    rows: list[bytes]
    """Empty: the key is deleted."""
    cursor: bytes
    """Where copying goes on: all before this row, or request ids' row, has come. Empty: all has."""
    tail: Position
    """All of the source's log up to here has come."""


class ImportEnd(NamedTuple):
    """The target has all of the range as it was at a freeze."""

    move: int
    freeze: Position
    records: int
    """How many, and what they hash to (digest.py)."""
    hash: int


class Freeze(NamedTuple):
    """The source takes no writes in the range from here on. Named by its position."""

    move: int
    target: PartitionId
    span: Span


class Unfreeze(NamedTuple):
    """The source takes writes again."""

    move: int


class Release(NamedTuple):
    """The source owns the range no more."""

    move: int
    freeze: Position
    records: int
    target: PartitionId = PartitionId("")
    """As in the freeze: feeds are told here where the range goes on. Empty, and no range, in old logs."""
    span: Span | None = None


class Own(NamedTuple):
    """The target owns the range; its sequences and times go on behind the source's."""

    move: int
    freeze: Position
    release: Position
    """Where the source's log says so."""
    seq: int
    """Of the source then."""
    time_ms: int
    source: PartitionId = PartitionId("")
    """As in the import: feeds are told here whose changes come first. Empty, and no range, in old logs."""
    span: Span | None = None


class Drop(NamedTuple):
    """Rows of a range that was released, or whose import was given up, go."""

    move: int
    until: bytes
    """All records before this key. Empty: all of them, and nothing is remembered of the move."""


class LogVersion(NamedTuple):
    """The log is written by another cluster version from here on (docs/protocol.md V4)."""

    version: int
    release: str = ""
    """Of the software that can do it: what reads the log from here on is no older."""


MoveRecord = (
    Founded | ImportBegin | ImportRows | ImportEnd | Freeze | Unfreeze | Release | Own | Drop | Mark | LogVersion
)
"""The last two are about no token: they change no ownership."""

KIND_OF: dict[type, Kind] = {
    Founded: Kind.EPOCH_START,
    ImportBegin: Kind.IMPORT_BEGIN,
    ImportRows: Kind.IMPORT,
    ImportEnd: Kind.IMPORT_END,
    Freeze: Kind.FREEZE,
    Unfreeze: Kind.UNFREEZE,
    Release: Kind.RELEASE_RANGE,
    Own: Kind.OWN,
    Drop: Kind.DROP,
    Mark: Kind.MARK,
    LogVersion: Kind.LOG_VERSION,
}
_decoders: dict[int, ArrayDecoder[Any]] = {int(kind): ArrayDecoder(record) for record, kind in KIND_OF.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(record: MoveRecord) -> bytes:
    return _encode(record)


def decode(kind: int, control: bytes) -> MoveRecord:
    """The record in `control`; fields behind those that are known are passed over. Raises Corrupted."""
    try:
        return _decoders[kind].decode(control)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, KeyError) as error:
        raise Corrupted(f"control record of kind {kind}, {control[:32].hex()}, cannot be read: {error}") from error
