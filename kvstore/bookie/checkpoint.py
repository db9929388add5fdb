"""A full segment's index as bytes, so that a start need not read the segment. Pure. The grammar is in docs/formats.md.

It holds the places of the segment's entries, and of every ledger with a record in the segment what was known of it
when the segment was full. Applied in the order of segments this gives the same state as the records would.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from struct import Struct

from crc32c import crc32c

MAGIC = b"kvs-indx"
FORMAT = 2
FORMAT_WITH_FILES = 1
"""Each had the list of the segments in it."""
LIST_MAGIC = b"kvs-segs"
LIST_FORMAT = 1

_LIST = Struct(">II")
"""The segment beside whose checkpoint it stands, and how many: segments."""
_HEADER = Struct(">8sII")
"""magic, format, crc of the rest."""
_SEGMENT = Struct(">IQQQBIIIII")
"""file, salt, end, last group, limbo, and how many: files, dropped, tombstones, ledgers; 0."""
_LEDGER = Struct(">qBqHHqIIq")
"""ledger, flags, lac, bytes of key and of explicit LAC, first entry, run, moved entries, live bytes."""
_MOVED = Struct(">qQI")

FENCED, ADMITTED, LIMBO = 1, 2, 4


@dataclass(slots=True)
class LedgerPart:
    """One ledger as it stood when the segment was full, and where its entries in the segment are."""

    ledger: int
    flags: int
    lac: int
    key: bytes
    explicit_lac: bytes
    live_bytes: int = 0
    first: int = 0
    """The entry at the beginning of the run."""
    places: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    moved: list[tuple[int, int, int]] = field(default_factory=list)
    """Entries out of line: (entry, place, size)."""


@dataclass(slots=True)
class Checkpoint:
    file: int
    salt: int
    end: int
    last_group: int
    is_limbo: bool
    """Records of any ledger may be missing."""
    files: list[int]
    """The segments that there were, the one after this included; empty: not known. They stand in a list of their own,
    in format 1 in here."""
    dropped: list[int]
    """Ledgers with records in this segment, or dropped in it, that are gone."""
    tombstones: list[int]
    """Those of them whose fence stays."""
    ledgers: list[LedgerPart]


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
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
            part.first,
            len(part.places),
            len(part.moved),
            part.live_bytes,
        )
        parts += (head, part.key, part.explicit_lac, _big(part.places), _big(part.sizes))
        parts += [_MOVED.pack(*moved) for moved in part.moved]
    rest = b"".join(parts)
    return _HEADER.pack(MAGIC, FORMAT, crc32c(rest)) + rest


def decode_checkpoint(data: bytes) -> Checkpoint | None:
    """None for anything but a whole checkpoint. Raises ValueError for a format that this build does not know."""
    if len(data) < _HEADER.size:
        return None
    magic, version, crc = _HEADER.unpack_from(data)
    if magic != MAGIC or crc != crc32c(data[_HEADER.size :]):
        return None
    if version not in (FORMAT_WITH_FILES, FORMAT):
        raise ValueError(f"index format {version}; this build reads {FORMAT_WITH_FILES} and {FORMAT}")
    reader = _Reader(data, _HEADER.size)
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
        ledgers=[_ledger(reader) for _ in range(ledgers)],
    )


def encode_list(file: int, files: list[int]) -> bytes:
    """The segments that there are, when `file` was full."""
    rest = _LIST.pack(file, len(files)) + _packed("I", files)
    return _HEADER.pack(LIST_MAGIC, LIST_FORMAT, crc32c(rest)) + rest


def decode_list(data: bytes, file: int) -> list[int] | None:
    """None for anything but a whole list that stands beside the checkpoint of `file`. Raises ValueError for a format
    that this build does not know."""
    if len(data) < _HEADER.size + _LIST.size:
        return None
    magic, version, crc = _HEADER.unpack_from(data)
    if magic != LIST_MAGIC or crc != crc32c(data[_HEADER.size :]):
        return None
    if version != LIST_FORMAT:
        raise ValueError(f"format {version} of a list of segments; this build reads {LIST_FORMAT}")
    reader = _Reader(data, _HEADER.size)
    of, count = reader.unpack(_LIST)
    return reader.array("I", count).tolist() if of == file else None


def _ledger(reader: _Reader) -> LedgerPart:
    ledger, flags, lac, key, explicit_lac, first, count, moved, live_bytes = reader.unpack(_LEDGER)
    return LedgerPart(
        ledger=ledger,
        flags=flags,
        lac=lac,
        key=reader.bytes(key),
        explicit_lac=reader.bytes(explicit_lac),
        live_bytes=live_bytes,
        first=first,
        places=reader.array("Q", count),
        sizes=reader.array("I", count),
        moved=[(entry, place, size) for entry, place, size in (reader.unpack(_MOVED) for _ in range(moved))],
    )


class _Reader:
    """Takes one thing after the other from bytes whose checksum was right."""

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
        numbers = array(code)
        numbers.frombytes(self.bytes(count * numbers.itemsize))
        if sys.byteorder == "little":
            numbers.byteswap()
        return numbers


def _big(numbers: array[int]) -> bytes:
    if sys.byteorder == "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _packed(code: str, numbers: list[int]) -> bytes:
    return _big(array(code, numbers))
