"""The journal's bytes: golden, and checked against every flipped bit."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from kvstore.bookie.journal import record
from kvstore.bookie.journal.record import FileHeader, GroupHeader, RecordKind
from tests.bits import flipped

SALT = 0x0123456789ABCDEF
SEED = record.seed_of(SALT)
BODY = bytes(range(168))
RECORD = record.encode_record_head(RecordKind.ADD, record.RECOVERY, 7, 3, BODY, seed=SEED, offset=4096) + BODY
GROUP = record.encode_group_header(GroupHeader(2, 1000, 5, 1, 9000), SALT, 64)
FILE = record.encode_file_header(FileHeader(3, SALT))


def decoded(data: bytes, offset: int = 4096) -> bytes | None:
    """Return the body of a record that passes every check."""
    head = record.decode_record_head(data, 0, seed=SEED, offset=offset)
    body = data[record.RECORD_HEADER_SIZE :]
    return body if head is not None and record.is_body_good(head, body) else None


def test_bytes_do_not_change() -> None:
    assert RECORD[:32].hex() == "01010000000000a800000000000000070000000000000003" + RECORD[24:32].hex()
    assert record.encode_record_head(RecordKind.ADD, 0, 7, 3, b"hello", seed=SEED, offset=4096).hex() == (
        "01000000000000050000000000000007000000000000000361ce95d99ae96020"
    )
    assert GROUP.hex() == "0123456789abcdef00000002000003e8000000000000000500000000000023280000000100000000d63ed3ef"
    assert FILE.hex() == "6b76732d6a726e6c00000001000000030123456789abcdef" + "00" * 36 + "23fab755"


def test_record_reads_back() -> None:
    assert decoded(RECORD) == BODY
    assert record.decode_record_head(RECORD, 0, seed=SEED, offset=4096)[:5] == (1, 1, 168, 7, 3)  # type: ignore[index]
    assert record.decode_group_header(GROUP, 0, SALT, 64) == GroupHeader(2, 1000, 5, 1, 9000)
    assert record.decode_file_header(FILE) == FileHeader(3, SALT)


def test_record_with_a_flipped_bit_does_not_pass() -> None:
    assert len(RECORD) == 200
    assert [bit for bit in range(1600) if decoded(flipped(RECORD, bit)) is not None] == []


def test_header_with_a_flipped_bit_does_not_pass() -> None:
    assert [b for b in range(8 * len(GROUP)) if record.decode_group_header(flipped(GROUP, b), 0, SALT, 64)] == []
    assert [b for b in range(8 * len(FILE)) if record.decode_file_header(flipped(FILE, b))] == []


def test_bytes_of_another_offset_or_file_do_not_pass() -> None:
    assert decoded(RECORD, offset=4128) is None
    assert record.decode_group_header(GROUP, 0, SALT, 128) is None
    assert record.decode_group_header(GROUP, 0, SALT + 1, 64) is None
    assert record.decode_record_head(RECORD, 0, seed=SEED ^ 1, offset=4096) is None


@pytest.mark.parametrize("size", range(0, 200, 13))
def test_cut_record_does_not_pass(size: int) -> None:
    assert decoded(RECORD[:size]) is None


def test_unknown_format_is_refused_by_number() -> None:
    data = bytearray(FILE[:60])
    data[8:12] = struct.pack(">I", 9)
    with pytest.raises(ValueError, match="expected journal format 1, got 9"):
        record.decode_file_header(bytes(data) + struct.pack(">I", crc32c(bytes(data))))
