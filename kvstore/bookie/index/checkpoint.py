"""A full segment's index as bytes, so that neither a start nor a read must read the segment. Pure. The grammar is in
docs/reference/formats.md.

It has the places of the segment's entries, in blocks (blocks.py), followed by a table. For every ledger with a record
in the segment, the table has the ledger's state when the segment was full, and the offsets of its blocks. A start reads
only the table. The tables, applied in the order of the segments, give the same state as the records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct

from crc32c import crc32c

from kvstore.bookie.index.blocks import Extent, big, blocks_of, encode_extents, has_fences, lay_out, native
from kvstore.bookie.index.entry_index import EntryIndex

MAGIC = b"kvs-indx"
FORMAT = 3
COMPLETE_FORMATS = (1, 2)
"""Former formats that had the entries of each ledger beside it, and were read as a whole; format 1 also contained the
list of the segments."""
LIST_MAGIC = b"kvs-segs"
LIST_FORMAT = 2
UNCOVERED_LIST_FORMAT = 1
"""The format whose checksum did not cover the format."""

_LIST = Struct(">II")
"""The segment whose checkpoint the list accompanies, and the number of segments."""
_HEADER = Struct(">8sII")
"""Magic, format, CRC of the rest; since the format is covered too, of the bytes before the CRC first."""
_TABLE_AT = Struct(">QQ")
"""Offset of the table, and its size."""
_BEFORE_CRC = 12
HEADER_SIZE = _HEADER.size + _TABLE_AT.size
_SEGMENT = Struct(">IQQQBIIIII")
"""File, salt, end, last group, limbo, and the numbers of files, dropped ledgers, tombstones and ledgers; 0."""
_LEDGER = Struct(">qBqHHIIq")
"""Ledger, flags, LAC, bytes of the key and of the explicit LAC, extents, superseded, live bytes."""
_EXTENT = Struct(">QQIQ")
"""First, last, count, start."""
_SUPERSEDED = Struct(">IQ")
_COMPLETE_LEDGER = Struct(">qBqHHqIIq")
"""Ledger, flags, LAC, bytes of the key and of the explicit LAC, first entry, run, moved entries, live bytes."""
_MOVED = Struct(">qQI")

FENCED, ADMITTED, LIMBO = 1, 2, 4


@dataclass(slots=True)
class LedgerPart:
    """The state of one ledger when the segment was full, and where its entries in the segment are."""

    ledger: int
    flags: int
    lac: int
    key: bytes
    explicit_lac: bytes
    live_bytes: int = 0
    superseded: list[tuple[int, int]] = field(default_factory=list)
    """Older segments, with the number of bytes that are no longer needed because this segment, or one that was removed
    before it was full, has their entries."""
    extents: list[Extent] = field(default_factory=list)
    entries: EntryIndex | None = None
    """The entries in memory, until the checkpoint is on disk. In a checkpoint that was read, only if it has a former
    format, which has no extents and does not say what is superseded."""


@dataclass(slots=True)
class Checkpoint:
    file: int
    salt: int
    end: int
    last_group: int
    is_limbo: bool
    """True if records of any ledger may be missing."""
    files: list[int]
    """The segments that existed, including the one after this; empty: unknown. They are in their own list; in
    format 1, in this file."""
    dropped: list[int]
    """Ledgers that are gone and had records in this segment or were dropped in it."""
    tombstones: list[int]
    """Those of the dropped ledgers whose fence remains."""
    ledgers: list[LedgerPart]
    format: int = FORMAT

    def place_entries(self) -> None:
        """Choose the offsets of the ledgers' entries in the file."""
        at = HEADER_SIZE
        for part in self.ledgers:
            if part.entries is not None:
                part.extents = lay_out(part.entries.ids(), at)
                at = part.extents[-1].end if part.extents else at
        self.format = FORMAT


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Encode a checkpoint whose entries are placed and in memory."""
    blocks = []
    for part in checkpoint.ledgers:
        if part.entries is not None:
            blocks.append(encode_extents(part.entries.columns(), part.extents, checkpoint.salt))
    return with_table(b"".join(blocks), checkpoint)


def with_table(blocks: bytes, checkpoint: Checkpoint) -> bytes:
    """Return the checkpoint's bytes with these blocks, which are at the offsets that its table says."""
    table = _table(checkpoint)
    where = _TABLE_AT.pack(HEADER_SIZE + len(blocks), len(table))
    before = _HEADER.pack(MAGIC, FORMAT, 0)[:_BEFORE_CRC]
    crc = crc32c(table, crc32c(where, crc32c(before)))
    return b"".join((_HEADER.pack(MAGIC, FORMAT, crc), where, blocks, table))


def _table(checkpoint: Checkpoint) -> bytes:
    parts = [
        _SEGMENT.pack(
            checkpoint.file,
            checkpoint.salt,
            checkpoint.end,
            checkpoint.last_group,
            checkpoint.is_limbo,
            0,
            len(checkpoint.dropped),
            len(checkpoint.tombstones),
            len(checkpoint.ledgers),
            0,
        ),
        _packed("Q", checkpoint.dropped),
        _packed("Q", checkpoint.tombstones),
    ]
    for part in checkpoint.ledgers:
        head = _LEDGER.pack(
            part.ledger,
            part.flags,
            part.lac,
            len(part.key),
            len(part.explicit_lac),
            len(part.extents),
            len(part.superseded),
            part.live_bytes,
        )
        parts += (head, part.key, part.explicit_lac)
        parts += [_SUPERSEDED.pack(*each) for each in part.superseded]
        for extent in part.extents:
            parts += (_EXTENT.pack(*extent[:4]), big(extent.fences))
    return b"".join(parts)


def table_span(head: bytes) -> tuple[int, int] | None:
    """Return the offset and the size of a checkpoint's table from the first bytes of the file, which are not verified
    yet. Return None for a format that is read as a whole."""
    if len(head) < HEADER_SIZE or _HEADER.unpack_from(head)[1] in COMPLETE_FORMATS:
        return None
    at, size = _TABLE_AT.unpack_from(head, _HEADER.size)
    return at, size


def decode_checkpoint(head: bytes, table: bytes) -> Checkpoint | None:
    """Decode a checkpoint from its first bytes and its table. Return None unless they are a checkpoint; a format
    changed by damage is not. Raises ValueError for a format that this version does not know."""
    magic, version, crc = _HEADER.unpack_from(head)
    if magic != MAGIC or crc != crc32c(table, crc32c(head[_HEADER.size : HEADER_SIZE], crc32c(head[:_BEFORE_CRC]))):
        return None
    if version != FORMAT:
        raise ValueError(f"expected index format 1 to {FORMAT}, got {version}")
    return _decode(_Reader(table, 0), version, _ledger)


def decode_complete(data: bytes) -> Checkpoint | None:
    """Decode a checkpoint of a former format. Return None for anything else."""
    if len(data) < _HEADER.size:
        return None
    magic, version, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or crc != crc32c(data[_HEADER.size :]) or version not in COMPLETE_FORMATS:
        return None
    return _decode(_Reader(data, _HEADER.size), version, _complete_ledger)


def _decode(reader: _Reader, version: int, ledger_of: Callable[[_Reader], LedgerPart]) -> Checkpoint:
    file, salt, end, group, limbo, files, dropped, tombstones, ledgers, _ = reader.unpack(_SEGMENT)
    return Checkpoint(
        file=file,
        salt=salt,
        end=end,
        last_group=group,
        is_limbo=bool(limbo),
        files=reader.array("I", files).tolist(),
        dropped=reader.array("Q", dropped).tolist(),
        tombstones=reader.array("Q", tombstones).tolist(),
        ledgers=[ledger_of(reader) for _ in range(ledgers)],
        format=version,
    )


def _ledger(reader: _Reader) -> LedgerPart:
    ledger, flags, lac, key, explicit_lac, extents, superseded, live_bytes = reader.unpack(_LEDGER)
    return LedgerPart(
        ledger=ledger,
        flags=flags,
        lac=lac,
        key=reader.bytes(key),
        explicit_lac=reader.bytes(explicit_lac),
        live_bytes=live_bytes,
        superseded=[(file, size) for file, size in (reader.unpack(_SUPERSEDED) for _ in range(superseded))],
        extents=[_extent(reader) for _ in range(extents)],
    )


def _extent(reader: _Reader) -> Extent:
    first, last, count, start = reader.unpack(_EXTENT)
    fences = blocks_of(count) if has_fences(first, last, count) else 0
    return Extent(first, last, count, start, reader.array("Q", fences))


def _complete_ledger(reader: _Reader) -> LedgerPart:
    ledger, flags, lac, key, explicit_lac, first, count, moved, live_bytes = reader.unpack(_COMPLETE_LEDGER)
    part = LedgerPart(ledger, flags, lac, reader.bytes(key), reader.bytes(explicit_lac), live_bytes)
    entries = EntryIndex()
    entries.extend(first, reader.array("Q", count), reader.array("I", count))
    for _ in range(moved):
        entries.put(*reader.unpack(_MOVED))
    part.entries = entries if entries.count else None
    return part


def encode_list(file: int, files: list[int]) -> bytes:
    """Encode the list of the segments that existed when `file` was full."""
    rest = _LIST.pack(file, len(files)) + _packed("I", files)
    before = _HEADER.pack(LIST_MAGIC, LIST_FORMAT, 0)[:_BEFORE_CRC]
    return _HEADER.pack(LIST_MAGIC, LIST_FORMAT, crc32c(rest, crc32c(before))) + rest


def decode_list(data: bytes, file: int) -> list[int] | None:
    """Decode a list. Return None unless it is intact and accompanies the checkpoint of `file`; a format changed by
    damage does not count. Raises ValueError for a format that this version does not know."""
    if len(data) < _HEADER.size + _LIST.size:
        return None
    magic, version, crc = _HEADER.unpack_from(data)
    start = 0 if version == UNCOVERED_LIST_FORMAT else crc32c(data[:_BEFORE_CRC])
    if magic != LIST_MAGIC or crc != crc32c(data[_HEADER.size :], start):
        return None
    if version not in (UNCOVERED_LIST_FORMAT, LIST_FORMAT):
        raise ValueError(f"expected format 1 or {LIST_FORMAT} of a list of segments, got {version}")
    reader = _Reader(data, _HEADER.size)
    of, count = reader.unpack(_LIST)
    return reader.array("I", count).tolist() if of == file else None


class _Reader:
    """Reads one field after the other from bytes with a verified checksum."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def bytes(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def unpack(self, form: Struct) -> tuple[int, ...]:
        return form.unpack(self.bytes(form.size))

    def array(self, code: str, count: int) -> array[int]:
        return native(code, self.bytes(count * array(code).itemsize))


def _packed(code: str, numbers: list[int]) -> bytes:
    return big(array(code, numbers))
