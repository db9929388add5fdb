"""The file PLACE, to the byte."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from kvstore.bookie.directories.places import DirectoryMember, MemberState, PlaceFile, decode_place, encode_place

PLACE = PlaceFile(
    bookie="b1-0123456789ab",
    version=4,
    here=2,
    members=(
        DirectoryMember(0, "00000000000000a0", MemberState.PRESENT, "bookie/journal"),
        DirectoryMember(1, "00000000000000b1", MemberState.GONE, "/disk two/journal"),
        DirectoryMember(2, "00000000000000c2", MemberState.JOINING, "/disk two/journal"),
    ),
)
GOLDEN = b"""kvstore journal directories 1
bookie b1-0123456789ab
version 4
here 2
0 00000000000000a0 present bookie/journal
1 00000000000000b1 gone /disk two/journal
2 00000000000000c2 joining /disk two/journal
crc 4a2ab8b5
"""


def test_golden_bytes() -> None:
    assert encode_place(PLACE) == GOLDEN
    assert decode_place(GOLDEN) == PLACE


@pytest.mark.parametrize("at", range(len(GOLDEN)))
def test_damaged_place_file_decodes_to_none(at: int) -> None:
    assert decode_place(GOLDEN[:at]) is None
    assert decode_place(GOLDEN[:at] + bytes([GOLDEN[at] ^ 1]) + GOLDEN[at + 1 :]) is None


def test_place_file_of_unknown_format_is_refused() -> None:
    later = encode_place(PLACE).replace(b"directories 1", b"directories 2")
    with pytest.raises(ValueError, match="expected format kvstore journal directories 1, got"):
        decode_place(_with_crc(later))


def _with_crc(data: bytes) -> bytes:
    text = data[: data.rindex(b"crc ")]
    return text + b"crc %08x\n" % crc32c(text)
