"""A page of a pinned read, and the rows in it. Decides only.

Rows travel as partitions store them, with all keys and all rows joined: the maker and the reader of a page copy each
byte once, and vectorised readers need no loop (docs/reference/formats.md, Pages of pinned reads).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from kvstore.errors import Corrupted
from kvstore.proto import data_pb2

FORMAT = 1
TOKEN_BYTES = 5
"""Length of the prefix of a row key before the key itself: `d` and the token."""
HEADER_BYTES_MIN = 17
AGED, EXPIRES = 1, 2
"""Flags of a row's header. Each adds 8 bytes: the sequence that created the key, and the expiry."""
DELETED = 4
"""Flag of a row that says that an intent deletes the key. It is created by sequence 0. Only reads of intents alone have
such rows."""
HEADER_BYTES = bytes((17, 25, 25, 33)) * 2
"""Header length by flags."""
_fixed = Struct(">BQQ")
_word = Struct(">Q")


class PinnedRow(NamedTuple):
    """A key with its value, as stored at a pinned position."""

    key: bytes
    value: bytes
    version: int
    """The sequence of the mutation that last wrote the key."""
    created: int
    """The sequence of the mutation that created the key; 0 if the key is deleted."""
    written_ms: int
    expires_ms: int
    """0: never."""

    @property
    def is_deleted(self) -> bool:
        """True if the row says that the key is deleted. Only reads of intents alone have such rows."""
        return self.created == 0


def encode(keys: list[bytes], rows: list[bytes], time_ms: int, last: bytes, *, ends: bool) -> data_pb2.PinnedPage:
    """Make a page of row keys and rows. `time_ms` is 0 unless the page contains expired records; then it is the time by
    which they had expired."""
    return data_pb2.PinnedPage(
        format=FORMAT,
        count=len(keys),
        keys=b"".join(keys),
        key_lengths=_lengths(keys),
        rows=b"".join(rows),
        row_lengths=_lengths(rows),
        time_ms=time_ms,
        last=last,
        ends=ends,
    )


@dataclass(frozen=True, slots=True)
class PageColumns:
    """The columns of a page, extracted once, because each access to a field of a message copies it, perhaps a
    mebibyte."""

    count: int
    keys: bytes
    key_lengths: bytes
    rows: bytes
    row_lengths: bytes
    time_ms: int
    """0: nothing in it had expired."""


def columns_of(page: data_pb2.PinnedPage) -> PageColumns:
    """Extract the columns. Raises Corrupted unless they are consistent."""
    if page.format != FORMAT:
        raise Corrupted(f"expected a page in format {FORMAT}, got format {page.format}")
    found = PageColumns(page.count, page.keys, page.key_lengths, page.rows, page.row_lengths, page.time_ms)
    want = 4 * found.count
    if len(found.key_lengths) != want or len(found.row_lengths) != want:
        raise Corrupted(
            f"a page of {found.count} rows has {len(found.key_lengths)} and {len(found.row_lengths)} bytes of lengths"
        )
    for data, lengths in ((found.keys, found.key_lengths), (found.rows, found.row_lengths)):
        if len(data) != sum(lengths_of(lengths)):
            raise Corrupted(f"expected a page with a column of {sum(lengths_of(lengths))} bytes, got {len(data)}")
    return found


def joined(pages: Sequence[PageColumns]) -> PageColumns:
    """Join pages of one time as if they were one page."""
    return PageColumns(
        sum(each.count for each in pages),
        b"".join(each.keys for each in pages),
        b"".join(each.key_lengths for each in pages),
        b"".join(each.rows for each in pages),
        b"".join(each.row_lengths for each in pages),
        pages[0].time_ms,
    )


def rows_of(page: PageColumns) -> Iterator[PinnedRow]:
    """Yield the records, without those that had expired."""
    keys, rows, time_ms, key_at, row_at = page.keys, page.rows, page.time_ms, 0, 0
    for key_bytes, row_bytes in zip(lengths_of(page.key_lengths), lengths_of(page.row_lengths), strict=True):
        key = keys[key_at + TOKEN_BYTES : key_at + key_bytes]
        row = row_of(key, rows[row_at : row_at + row_bytes])
        if not 0 < row.expires_ms <= time_ms:
            yield row
        key_at += key_bytes
        row_at += row_bytes


def row_of(key: bytes, row: bytes) -> PinnedRow:
    """Decode a stored row."""
    flags, version, written_ms = _fixed.unpack_from(row)
    at = HEADER_BYTES_MIN
    created, expires_ms = version, 0
    if flags & AGED:
        (created,) = _word.unpack_from(row, at)
        at += 8
    if flags & EXPIRES:
        (expires_ms,) = _word.unpack_from(row, at)
        at += 8
    return PinnedRow(key, row[at:], version, created, written_ms, expires_ms)


def deleted(version: int, time_ms: int) -> bytes:
    """Return the row that says that a mutation deletes the key."""
    return _fixed.pack(AGED | DELETED, version, time_ms) + _word.pack(0)


def is_deleted(row: bytes) -> bool:
    """Return True if the row says that the key is deleted."""
    return bool(row[0] & DELETED)


def lengths_of(column: bytes) -> array[int]:
    """Return the numbers in a column of lengths."""
    found = array("I")
    found.frombytes(column)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _lengths(each: list[bytes]) -> bytes:
    found = array("I", map(len, each))
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
