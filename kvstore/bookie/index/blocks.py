"""The bytes of a full segment's entries in its index file: blocks, and extents that say where they are. Pure. The
grammar is in docs/reference/formats.md.

A block has up to 255 entries of one ledger, rising, with a checksum of its own that starts from the segment's salt and
the block's place, so that neither another segment's block nor one in the wrong place passes. An extent is a stretch of
a ledger's entries, whose blocks stand one after the other. What is kept of it in memory says which block an entry is
in: of one without holes that is plain arithmetic, of others each block's first entry is kept.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from kvstore.bookie.index.entry_index import EntryColumns

BLOCK_ENTRIES = 255
"""With them a block is just below a page of the disk."""
GAP_MIN = 4096
"""Ids that are left out between two entries before another extent may begin: an extent that spans entries of another
segment costs their readers a look into it."""
EXTENTS_FREE, ENTRIES_EACH = 2, 64
"""So many extents may a ledger have, and one more for so many entries: extents are kept in memory."""
_STRIDE = 256
"""Ids that are looked at together."""
_HEAD = Struct(">II")
"""crc of what follows, seeded; entries."""
_ENTRY_BYTES = 16


class Extent(NamedTuple):
    """Entries of one ledger whose blocks stand together."""

    first: int
    last: int
    """Both are there."""
    entries: int
    start: int
    """Where its first block begins in the file."""
    fences: array[int]
    """The first entry of each block; empty where that follows from `first`: no holes, or one block."""

    @property
    def end(self) -> int:
        full, rest = divmod(self.entries, BLOCK_ENTRIES)
        return self.start + full * block_bytes(BLOCK_ENTRIES) + (block_bytes(rest) if rest else 0)


def has_fences(first: int, last: int, count: int) -> bool:
    return count > BLOCK_ENTRIES and last - first + 1 > count


def blocks_of(count: int) -> int:
    return -(-count // BLOCK_ENTRIES)


def block_bytes(count: int) -> int:
    return _HEAD.size + _ENTRY_BYTES * count


def block_span(start: int, count: int, number: int) -> tuple[int, int]:
    """Where block `number` of an extent stands, and how many entries it has."""
    return start + number * block_bytes(BLOCK_ENTRIES), min(BLOCK_ENTRIES, count - number * BLOCK_ENTRIES)


def block_number(first: int, fences: Sequence[int], entry: int) -> int:
    """The block of an extent that has `entry`, if any has it."""
    return bisect_right(fences, entry) - 1 if fences else (entry - first) // BLOCK_ENTRIES


def lay_out(entries: Sequence[int], start: int) -> list[Extent]:
    """Extents for entries that rise, from `start` in the file on."""
    if not entries:
        return []
    cuts = [0, *_cuts(entries), len(entries)]
    extents = []
    for begin, end in pairwise(cuts):
        first, last, count = entries[begin], entries[end - 1], end - begin
        fences = array("Q", entries[begin:end:BLOCK_ENTRIES] if has_fences(first, last, count) else ())
        extents.append(Extent(first, last, count, start, fences))
        start = extents[-1].end
    return extents


def _cuts(entries: Sequence[int]) -> Iterator[int]:
    """Where in `entries` another extent begins."""
    if entries[-1] - entries[0] + 1 == len(entries):
        return
    extents = 1
    for begin in range(0, len(entries) - 1, _STRIDE):
        end = min(begin + _STRIDE, len(entries) - 1)
        if entries[end] - entries[begin] <= GAP_MIN:
            continue  # none of the gaps between them is larger
        for at in range(begin + 1, end + 1):
            if entries[at] - entries[at - 1] > GAP_MIN and extents < EXTENTS_FREE + at // ENTRIES_EACH:
                extents += 1
                yield at


def seed_of(salt: int, at: int) -> int:
    """The number that the checksum of a block at `at` starts from."""
    return (salt ^ salt >> 32 ^ at) & 0xFFFFFFFF


def encode_extents(columns: EntryColumns, extents: list[Extent], salt: int) -> bytes:
    """The blocks of `extents`, which are all of `columns`."""
    parts, done = list[bytes](), 0
    ids, offsets, sizes = map(big, columns)
    for extent in extents:
        for number in range(blocks_of(extent.entries)):
            at, count = block_span(extent.start, extent.entries, number)
            end = done + count
            data = ids[8 * done : 8 * end] + offsets[4 * done : 4 * end] + sizes[4 * done : 4 * end]
            parts += (_HEAD.pack(crc32c(data, seed_of(salt, at) ^ count), count), data)
            done = end
    assert done == len(columns.entries), f"{done} entries are in extents, of {len(columns.entries)}"
    return b"".join(parts)


def decode_block(data: bytes, salt: int, at: int, count: int) -> EntryColumns | None:
    """None for anything but the block of `count` entries that stands at `at`."""
    if len(data) != block_bytes(count) or _HEAD.unpack_from(data) != (
        crc32c(data[_HEAD.size :], seed_of(salt, at) ^ count),
        count,
    ):
        return None
    ids, offsets = _HEAD.size + 8 * count, _HEAD.size + 12 * count
    return EntryColumns(
        native("Q", data[_HEAD.size : ids]), native("I", data[ids:offsets]), native("I", data[offsets:])
    )


def big(numbers: array[int]) -> bytes:
    """The numbers as bytes, highest first."""
    if sys.byteorder == "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def native(code: str, data: bytes) -> array[int]:
    """The numbers of which `data` are the bytes, highest first."""
    numbers = array(code, data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers
