"""The distinction between the end of the journal and a hole in it."""

from __future__ import annotations

import pytest

from kvstore.bookie.journal.record import (
    FILE_HEADER_SIZE,
    GROUP_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    FileHeader,
    GroupHeader,
    RecordKind,
    encode_file_header,
    encode_group_header,
    encode_record_head,
    seed_of,
)
from kvstore.bookie.journal.scan import SegmentScan, scan
from kvstore.bookie.steps import at_once

SALT = 0x1122334455667788
FILE = 4


class Built:
    """A segment of groups, each of which certifies the one before it as synced."""

    def __init__(self) -> None:
        self.data = bytearray(encode_file_header(FileHeader(FILE, SALT)))
        self.starts: list[int] = []
        self.records: list[list[int]] = []
        self._synced = (FILE - 1, 5000)

    def group(self, *sizes: int, kind: RecordKind = RecordKind.ADD) -> Built:
        start = len(self.data)
        at = start + GROUP_HEADER_SIZE
        body, offsets = b"", []
        for number, size in enumerate(sizes):
            payload = bytes([number]) * size
            offsets.append(at)
            body += encode_record_head(kind, 0, 7, number, payload, seed=seed_of(SALT), offset=at) + payload
            at = start + GROUP_HEADER_SIZE + len(body)
        header = GroupHeader(FILE, len(body), len(self.starts) + 1, *self._synced)
        self.data += encode_group_header(header, SALT, start) + body
        self.starts.append(start)
        self.records.append(offsets)
        self._synced = (FILE, len(self.data))
        return self

    def flip(self, offset: int) -> Built:
        self.data[offset] ^= 0x10
        return self

    def scan(self, known_end: int | None = None, *, zeroes: int = 1000) -> SegmentScan:
        return at_once(scan(bytes(self.data) + bytes(zeroes), FILE, SALT, known_end=known_end))


def offsets(result: SegmentScan) -> list[int]:
    return [found.offset for found in result.records]


def three_groups() -> Built:
    return Built().group(10, 20, 30).group(40, 50).group(60, 70, 80)


def test_scan_reads_everything_and_does_not_certify_the_last_group() -> None:
    built = three_groups()
    result = built.scan()
    assert offsets(result) == [at for group in built.records for at in group]
    assert (result.end, result.synced_to) == (len(built.data), built.starts[2])
    assert result.damage == []
    assert result.last_group == 3


def test_scan_of_an_empty_segment_finds_nothing() -> None:
    result = Built().scan()
    assert (result.records, result.damage, result.end) == ([], [], FILE_HEADER_SIZE)


# docs/protocol.md B6
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("where", [0, 8, 26, RECORD_HEADER_SIZE])
def test_bad_record_of_the_last_group_is_the_torn_tail(which: int, where: int) -> None:
    built = three_groups()
    bad = built.records[2][which]
    result = built.flip(bad + where).scan()
    assert result.damage == []
    assert offsets(result) == [at for group in built.records for at in group if at < bad]
    assert result.end == bad


def test_torn_header_of_the_last_group_ends_the_log_before_it() -> None:
    built = three_groups()
    result = built.flip(built.starts[2] + 20).scan()
    assert result.damage == []
    assert offsets(result) == [*built.records[0], *built.records[1]], "nothing certifies the second as synced"


def test_last_group_that_was_cut_short_is_read_to_the_cut() -> None:
    built = three_groups()
    del built.data[built.records[2][1] + 5 :]
    result = built.scan(zeroes=0)
    assert offsets(result) == [*built.records[0], *built.records[1], built.records[2][0]]
    assert result.damage == []


@pytest.mark.parametrize("group", [0, 1])
def test_bad_head_in_a_synced_group_is_damage_up_to_the_next_group(group: int) -> None:
    built = three_groups()
    bad = built.records[group][1]
    result = built.flip(bad + 3).scan()
    assert result.damage == [(bad, built.starts[group + 1])]
    after = [at for later in built.records[group + 1 :] for at in later]
    assert offsets(result) == [*(at for g in built.records[:group] for at in g), built.records[group][0], *after]
    assert result.end == len(built.data)


@pytest.mark.parametrize("group", [0, 1])
def test_bad_header_of_a_synced_group_is_damage_up_to_the_next_group(group: int) -> None:
    built = three_groups()
    result = built.flip(built.starts[group] + 12).scan()
    assert result.damage == [(built.starts[group], built.starts[group + 1])]
    assert result.end == len(built.data)


def test_bad_packet_in_a_synced_group_hides_nothing() -> None:
    built = three_groups()
    result = built.flip(built.records[0][1] + RECORD_HEADER_SIZE).scan()
    assert result.damage == []
    assert [found.is_good for found in result.records] == [True, False, *[True] * 6]


def test_bad_body_of_another_record_is_damage() -> None:
    built = Built().group(10, 20, kind=RecordKind.FENCE).group(5)
    bad = built.records[0][0]
    result = built.flip(bad + RECORD_HEADER_SIZE).scan()
    assert result.damage == [(bad, built.records[0][1])]


def test_missing_range_before_the_end_named_by_the_next_segment_is_damage() -> None:
    built = three_groups()
    end = len(built.data)
    assert built.scan(end).damage == []
    bad = built.records[2][1]
    assert built.flip(bad).scan(end).damage == [(bad, end)]
    del built.data[built.starts[1] :]
    result = built.scan(end, zeroes=0)
    assert result.damage == [(built.starts[1], end)]
    assert offsets(result) == built.records[0]


def test_bytes_after_the_end_named_by_the_next_segment_are_ignored() -> None:
    built = three_groups()
    result = built.scan(built.starts[2])
    assert offsets(result) == [*built.records[0], *built.records[1]]
    assert result.end == built.starts[2]
    assert result.damage == []


def test_valid_record_after_a_bad_one_in_the_tail_is_ignored() -> None:
    """Groups are written one after the other, but the blocks of one group reach the disk in any order."""
    built = Built().group(600, 600, 600)
    result = built.flip(built.records[0][1] + 2).scan()
    assert offsets(result) == built.records[0][:1]


def test_zeros_instead_of_a_synced_middle_are_damage() -> None:
    built = three_groups()
    start, stop = built.starts[0], built.starts[1]
    built.data[start:stop] = bytes(stop - start)
    assert built.scan().damage == [(start, stop)]
