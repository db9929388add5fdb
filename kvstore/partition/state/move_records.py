"""The contents of the control records about token ranges, and their encoding as the `control` bytes of an entry.
Decides only.

docs/reference/formats.md (Records of moves) describes every field, docs/protocol.md (Moving a range) the purpose of
each record. The bytes are MessagePack: an array of the fields in the order given here. DO NOT CHANGE the order. New
fields come last, have a default, and must be safe to ignore for readers that do not know them (docs/protocol.md V5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvstore.errors import Corrupted
from kvstore.partition.state.entry import EntryKind
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto.arrays import ArrayDecoder
from kvstore.types import PartitionId, Position


class Founded(NamedTuple):
    """Part of an epoch-start record: the tokens that the partition owns from that record on."""

    spans: tuple[TokenSpan, ...]


class ImportBegin(NamedTuple):
    """The target begins to copy a range from the source. The copy is empty at this point."""

    move: int
    attempt: int
    source: PartitionId
    span: TokenSpan
    pin: Position
    """The target follows the source's log from the entry after this position, and pins the log from that entry's ledger
    on."""


class ImportRows(NamedTuple):
    """Rows of the source, copied unchanged. The record takes one sequence, so that it can carry request ids."""

    move: int
    keys: list[bytes]
    """Row keys (rows.data_key)."""
    rows: list[bytes]
    """An empty row means that the key is deleted."""
    cursor: bytes
    """Where copying continues: everything before this row, or before this row of request ids, has been copied. Empty
    once everything has been copied."""
    tail: Position
    """The source's log has been followed up to this position."""


class ImportEnd(NamedTuple):
    """The target has the complete range as it was at a freeze."""

    move: int
    freeze: Position
    records: int
    """Number of records in the range. `hash` is the hash of these records (digest.py)."""
    hash: int


class Freeze(NamedTuple):
    """The source accepts no writes in the range from this record on. The record's position identifies the freeze."""

    move: int
    target: PartitionId
    span: TokenSpan


class Unfreeze(NamedTuple):
    """The source accepts writes in the range again."""

    move: int


class Release(NamedTuple):
    """The source no longer owns the range."""

    move: int
    freeze: Position
    records: int
    target: PartitionId = PartitionId("")
    """The target named in the freeze. It tells readers of the change feed where the range continues. In old logs,
    `target` is empty and `span` is None."""
    span: TokenSpan | None = None


class Own(NamedTuple):
    """The target owns the range. The target's sequences and times continue after those of the source."""

    move: int
    freeze: Position
    release: Position
    """Position of the release in the source's log."""
    seq: int
    """The source's sequence at the release."""
    time_ms: int
    source: PartitionId = PartitionId("")
    """The source named in the import. It tells readers of the change feed whose changes precede those of the target. In
    old logs, `source` is empty and `span` is None."""
    span: TokenSpan | None = None


class Drop(NamedTuple):
    """A record that removes rows of a range that was released, or whose import was abandoned."""

    move: int
    until: bytes
    """Remove all records before this key. If it is empty, remove all records of the range and forget the move."""


class LogVersion(NamedTuple):
    """From this record on, the log is written by another cluster version (docs/protocol.md V4)."""

    version: int
    release: str = ""
    """The oldest release of the software that can read the log from here on."""


MoveRecord = (
    Founded | ImportBegin | ImportRows | ImportEnd | Freeze | Unfreeze | Release | Own | Drop | MarkRecord | LogVersion
)
"""The last two concern no token and change no ownership."""

KIND_OF: dict[type, EntryKind] = {
    Founded: EntryKind.EPOCH_START,
    ImportBegin: EntryKind.IMPORT_BEGIN,
    ImportRows: EntryKind.IMPORT,
    ImportEnd: EntryKind.IMPORT_END,
    Freeze: EntryKind.FREEZE,
    Unfreeze: EntryKind.UNFREEZE,
    Release: EntryKind.RELEASE_RANGE,
    Own: EntryKind.OWN,
    Drop: EntryKind.DROP,
    MarkRecord: EntryKind.MARK,
    LogVersion: EntryKind.LOG_VERSION,
}
_decoders: dict[int, ArrayDecoder[Any]] = {int(kind): ArrayDecoder(record) for record, kind in KIND_OF.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(record: MoveRecord) -> bytes:
    if isinstance(record, MarkRecord) and not record.number:
        return _encode(record[:-1])  # as in logs of version 2 and earlier
    return _encode(record)


def decode(kind: int, control: bytes) -> MoveRecord:
    """Decode a record. Unknown fields at the end are ignored. Raises Corrupted if the bytes are malformed."""
    try:
        return _decoders[kind].decode(control)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, KeyError) as error:
        raise Corrupted(f"cannot read control record {control[:32].hex()} of kind {kind}: {error}") from error
