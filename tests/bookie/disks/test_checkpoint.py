"""A full segment's index as bytes."""

from __future__ import annotations

from array import array
from dataclasses import replace
from struct import pack

import pytest
from crc32c import crc32c

from kvstore.bookie.checkpoint import (
    ADMITTED,
    FENCED,
    Checkpoint,
    LedgerPart,
    decode_checkpoint,
    decode_list,
    encode_checkpoint,
    encode_list,
)

PART = LedgerPart(
    ledger=7,
    flags=FENCED | ADMITTED,
    lac=41,
    key=b"k" * 20,
    explicit_lac=b"e" * 20,
    live_bytes=300,
    first=40,
    places=array("Q", [3 << 40 | 108, 0, 3 << 40 | 500]),
    sizes=array("I", [100, 0, 200]),
    moved=[(2, 3 << 40 | 900, 50)],
)
CHECKPOINT = Checkpoint(
    file=3,
    salt=0x0123456789ABCDEF,
    end=1234,
    last_group=9,
    is_limbo=True,
    files=[1, 3, 4],
    dropped=[5, 6],
    tombstones=[6],
    ledgers=[PART, LedgerPart(8, 0, -1, b"", b"")],
)
DATA = encode_checkpoint(CHECKPOINT)


def test_a_checkpoint_reads_back() -> None:
    assert decode_checkpoint(DATA) == replace(CHECKPOINT, files=[]), "the list of the segments stands elsewhere"
    assert decode_list(encode_list(3, CHECKPOINT.files), 3) == CHECKPOINT.files


def test_the_bytes_do_not_change() -> None:
    assert DATA[:16].hex() == "6b76732d696e6478" + "00000002" + DATA[12:16].hex()
    assert DATA[16:].hex() == (
        "000000030123456789abcdef00000000000004d2000000000000000901"
        "0000000000000002000000010000000200000000"
        "000000000000000500000000000000060000000000000006"
        "00000000000000070300000000000000290014001400000000000000280000000300000001"
        "000000000000012c" + "6b" * 20 + "65" * 20
        + "000003000000006c000000000000000000000300000001f40000006400000000000000c8"
        "0000000000000002000003000000038400000032"
        "000000000000000800ffffffffffffffff0000000000000000000000000000000000000000"
        "0000000000000000"
    )  # fmt: skip


def test_no_flipped_bit_and_no_cut_passes() -> None:
    for bit in range(8 * len(DATA)):
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        if 64 <= bit < 96:
            with pytest.raises(ValueError, match="this build reads 1 and 2"):
                decode_checkpoint(bytes(changed))
        else:
            assert decode_checkpoint(bytes(changed)) is None, bit
    assert not any(decode_checkpoint(DATA[:size]) for size in range(len(DATA)))


def test_the_bytes_of_a_list_do_not_change() -> None:
    data = encode_list(3, [1, 3, 4])
    assert data.hex() == "6b76732d73656773" + "00000001" + data[12:16].hex() + (
        "0000000300000003" + "000000010000000300000004"
    )  # fmt: skip


def test_a_list_that_is_damaged_or_of_another_checkpoint_is_none() -> None:
    data = encode_list(3, [1, 3, 4])
    assert decode_list(data, 4) is None
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        if 64 <= bit < 96:
            with pytest.raises(ValueError, match="this build reads 1"):
                decode_list(bytes(changed), 3)
        else:
            assert decode_list(bytes(changed), 3) is None, bit
    assert not any(decode_list(data[:size], 3) for size in range(len(data)))


def test_a_checkpoint_of_the_first_format_has_the_list_in_it() -> None:
    """As it was written until the lists stood by themselves."""
    counted = bytearray(DATA[16:])
    at = 4 + 8 + 8 + 8 + 1
    counted[at : at + 4] = pack(">I", 3)
    head = at + 4 * 5
    rest = bytes(counted[:head]) + pack(">3I", 1, 3, 4) + bytes(counted[head:])
    assert decode_checkpoint(DATA[:8] + pack(">II", 1, crc32c(rest)) + rest) == CHECKPOINT
