"""A full segment's index as bytes."""

from __future__ import annotations

from array import array
from struct import pack

import pytest
from crc32c import crc32c

from kvstore.bookie.index.blocks import Extent, block_span, decode_block, lay_out
from kvstore.bookie.index.checkpoint import (
    ADMITTED,
    FENCED,
    HEADER_SIZE,
    Checkpoint,
    LedgerPart,
    decode_checkpoint,
    decode_complete,
    decode_list,
    encode_checkpoint,
    encode_list,
    table_span,
)
from kvstore.bookie.index.entry_index import EntryIndex
from tests.bits import flipped

SALT = 0x0123456789ABCDEF
ENTRIES = {2: (900, 50), 40: (108, 100), 42: (500, 200)}
"""Return entry → offset and size."""


def entries() -> EntryIndex:
    index = EntryIndex()
    for entry, (offset, size) in ENTRIES.items():
        index.put(entry, 3 << 40 | offset, size)
    return index


def checkpoint() -> Checkpoint:
    part = LedgerPart(
        ledger=7,
        flags=FENCED | ADMITTED,
        lac=41,
        key=b"k" * 20,
        explicit_lac=b"e" * 20,
        live_bytes=350,
        superseded=[(1, 400), (2, 50)],
        entries=entries(),
    )
    made = Checkpoint(
        file=3,
        salt=SALT,
        end=1234,
        last_group=9,
        is_limbo=True,
        files=[1, 3, 4],
        dropped=[5, 6],
        tombstones=[6],
        ledgers=[part, LedgerPart(8, 0, -1, b"", b"")],
    )
    made.place_entries()
    return made


DATA = encode_checkpoint(checkpoint())
HEAD = DATA[:HEADER_SIZE]
AT, SIZE = table_span(HEAD) or (0, 0)
TABLE = DATA[AT : AT + SIZE]
BEFORE = (
    "000000030123456789abcdef00000000000004d2000000000000000901"
    "0000000000000002000000010000000200000000"
    "000000000000000500000000000000060000000000000006"
)  # fmt: skip
FORMAT_2_REST = bytes.fromhex(
    BEFORE
    + "00000000000000070300000000000000290014001400000000000000280000000300000001"
    "000000000000012c" + "6b" * 20 + "65" * 20
    + "000003000000006c000000000000000000000300000001f40000006400000000000000c8"
    "0000000000000002000003000000038400000032"
    "000000000000000800ffffffffffffffff0000000000000000000000000000000000000000"
    "0000000000000000"
)  # fmt: skip
FORMAT_2 = b"kvs-indx" + pack(">II", 2, crc32c(FORMAT_2_REST)) + FORMAT_2_REST


def test_checkpoint_reads_back() -> None:
    found, written = decode_checkpoint(HEAD, TABLE), checkpoint()
    assert found is not None
    written.files, written.ledgers[0].entries = [], None
    assert found == written, "except the list of segments and the entries, which are elsewhere"
    assert len(DATA) == AT + SIZE
    assert decode_list(encode_list(3, [1, 3, 4]), 3) == [1, 3, 4]


def test_checkpoint_entries_read_back() -> None:
    (extent,) = checkpoint().ledgers[0].extents
    assert extent == Extent(2, 42, 3, HEADER_SIZE, array("Q"))
    at, count = block_span(extent.start, extent.entries, 0)
    block = decode_block(DATA[at:AT], SALT, at, count)
    assert block is not None
    rows = zip(*block, strict=True)
    assert {entry: (offset, size) for entry, offset, size in rows} == ENTRIES


def test_bytes_do_not_change() -> None:
    assert HEAD.hex() == "6b76732d696e6478" + "00000003" + HEAD[12:16].hex() + f"{HEADER_SIZE + 56:016x}{SIZE:016x}"
    assert DATA[HEADER_SIZE:AT].hex() == DATA[HEADER_SIZE : HEADER_SIZE + 4].hex() + (
        "00000003" + "0000000000000002" + "0000000000000028" + "000000000000002a"
        "000003840000006c000001f4" + "0000003200000064000000c8"
    )  # fmt: skip
    assert TABLE.hex() == (
        BEFORE
        + "0000000000000007030000000000000029001400140000000100000002000000000000015e" + "6b" * 20 + "65" * 20
        + "00000001" + "0000000000000190" + "00000002" + "0000000000000032"
        + "0000000000000002" + "000000000000002a" + "00000003" + f"{HEADER_SIZE:016x}"
        + "000000000000000800ffffffffffffffff0000000000000000000000000000000000000000"
    )  # fmt: skip


def test_no_flipped_bit_and_no_cut_passes() -> None:
    """Nor a flipped bit in the format: a damaged file is rebuilt, and nothing reports a newer version."""
    for bit in range(8 * HEADER_SIZE):
        assert decode_checkpoint(flipped(HEAD, bit), TABLE) is None, bit
    for bit in range(8 * SIZE):
        assert decode_checkpoint(HEAD, flipped(TABLE, bit)) is None, bit
    assert not any(decode_checkpoint(HEAD, TABLE[:size]) for size in range(SIZE))
    assert not any(table_span(HEAD[:size]) for size in range(HEADER_SIZE))


def test_block_with_a_flipped_bit_or_wrong_offset_does_not_pass() -> None:
    block = DATA[HEADER_SIZE:AT]
    assert not any(decode_block(flipped(block, bit), SALT, HEADER_SIZE, 3) for bit in range(8 * len(block)))
    assert decode_block(block, SALT, HEADER_SIZE, 3) is not None
    assert decode_block(block, SALT, HEADER_SIZE + 56, 3) is None
    assert decode_block(block, SALT + 1, HEADER_SIZE, 3) is None
    assert decode_block(block[:-16], SALT, HEADER_SIZE, 2) is None


def test_checkpoint_format_of_a_newer_version_is_refused_by_number() -> None:
    before, where = HEAD[:8] + pack(">I", 4), HEAD[16:]
    head = before + pack(">I", crc32c(TABLE, crc32c(where, crc32c(before)))) + where
    with pytest.raises(ValueError, match="expected index format 1 to 3, got 4"):
        decode_checkpoint(head, TABLE)


def test_version_with_format_two_takes_format_three_for_damaged() -> None:
    """It then reads the segments. It compared the checksum of the bytes after the first 16."""
    assert crc32c(DATA[16:]) != int.from_bytes(DATA[12:16], "big")


def test_checkpoint_of_format_two_is_read() -> None:
    found = decode_complete(FORMAT_2)
    assert found is not None
    assert table_span(FORMAT_2[:HEADER_SIZE]) is None
    part, expected = found.ledgers[0], checkpoint()
    assert part.entries is not None
    assert part.entries.columns() == entries().columns()
    assert (part.live_bytes, part.superseded, part.extents) == (300, [], [])
    expected.place_entries()
    found.place_entries()
    assert part.extents == expected.ledgers[0].extents
    for bit in range(8 * len(FORMAT_2)):
        if not 64 <= bit < 96:
            assert decode_complete(flipped(FORMAT_2, bit)) is None, bit
        elif (changed := decode_complete(flipped(FORMAT_2, bit))) is not None:
            assert changed.format == 1, "in which the flag has the same meaning"


def test_checkpoint_of_format_one_contains_the_list() -> None:
    """As it was written before lists were separate files."""
    counted = bytearray(FORMAT_2_REST)
    at = 4 + 8 + 8 + 8 + 1
    counted[at : at + 4] = pack(">I", 3)
    head = at + 4 * 5
    rest = bytes(counted[:head]) + pack(">3I", 1, 3, 4) + bytes(counted[head:])
    found = decode_complete(b"kvs-indx" + pack(">II", 1, crc32c(rest)) + rest)
    assert found is not None
    assert found.files == [1, 3, 4]
    assert [part.ledger for part in found.ledgers] == [7, 8]


def test_segment_list_has_golden_bytes() -> None:
    data = encode_list(3, [1, 3, 4])
    rest = "0000000300000003" + "000000010000000300000004"
    assert data.hex() == "6b76732d73656773" + "00000002" + data[12:16].hex() + rest


def test_damaged_or_foreign_segment_list_decodes_to_none() -> None:
    data = encode_list(3, [1, 3, 4])
    assert decode_list(data, 4) is None
    for bit in range(8 * len(data)):
        assert decode_list(flipped(data, bit), 3) is None, bit
    assert not any(decode_list(data[:size], 3) for size in range(len(data)))


def test_segment_list_of_format_one_is_read_and_a_newer_one_refused() -> None:
    rest = encode_list(3, [1, 3, 4])[16:]
    assert decode_list(b"kvs-segs" + pack(">II", 1, crc32c(rest)) + rest, 3) == [1, 3, 4]
    before = b"kvs-segs" + pack(">I", 3)
    with pytest.raises(ValueError, match="expected format 1 or 2 of a list of segments, got 3"):
        decode_list(before + pack(">I", crc32c(rest, crc32c(before))) + rest, 3)


def test_extent_needs_fences_only_for_holes() -> None:
    (dense,) = lay_out(array("Q", range(100, 1100)), 32)
    assert (dense.first, dense.last, dense.entries, len(dense.fences)) == (100, 1099, 1000, 0)
    (striped,) = lay_out(array("Q", range(0, 3000, 3)), 32)
    assert striped.fences == array("Q", [0, 3 * 255, 3 * 510, 3 * 765])
    assert striped.end == dense.end == 32 + 3 * (8 + 16 * 255) + 8 + 16 * 235


def test_distant_ranges_become_a_limited_number_of_extents() -> None:
    far = lay_out(array("Q", [0, *range(1 << 40, (1 << 40) + 300)]), 32)
    assert [(extent.first, extent.entries) for extent in far] == [(0, 1), (1 << 40, 300)]
    scattered = lay_out(array("Q", range(0, 1000 << 20, 1 << 20)), 32)
    assert len(scattered) <= 2 + 1000 // 64, "they are kept in memory"
    assert sum(extent.entries for extent in scattered) == 1000
