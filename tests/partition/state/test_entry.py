"""The payload's columns and its bytes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupted
from kvstore.partition.state.entry import (
    CREATE,
    DELETE,
    EXPIRES,
    NOTE,
    OVERWRITE,
    REPLACES,
    Entry,
    EntryKind,
    Mutation,
    Requests,
    control,
    decode,
    is_release,
)
from kvstore.proto import entry_pb2
from kvstore.types import PartitionId, Seq

P1 = PartitionId("p1")
TIME_MS = 1_700_000_000_000


def fields(entry: Entry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in Entry.__slots__}


def full_entry() -> Entry:
    entry = Entry(P1, 3, 100, TIME_MS, bytes((CREATE | EXPIRES, OVERWRITE | REPLACES, DELETE, NOTE)))
    entry.keys = [b"a", b"b", b"c", b"d"]
    entry.values = [b"1", b"22"]
    entry.ages = [7]
    entry.expires_ms = [TIME_MS + 5]
    entry.replaced_ms = [TIME_MS + 9]
    entry.requests = Requests(
        [b"x" * 16, b"y" * 16],
        [4, 1],
        [TIME_MS - 2, TIME_MS - 1],
        [0, 1],
        [5, 1],
        [1 << 63, 2],
        [1, 3],
        [b"", b"r"],
        [b"", b"tttt"],
    )
    entry.check_seq, entry.check_crc = 99, 0xDEADBEEF
    return entry


def test_entry_has_golden_bytes() -> None:
    assert full_entry().encode().hex() == GOLDEN
    assert fields(decode(bytes.fromhex(GOLDEN))) == fields(full_entry())


def test_release_record_has_golden_bytes() -> None:
    payload = control(P1, 3, 101, TIME_MS, EntryKind.RELEASE_LEAD).encode()
    assert payload.hex() == "080112027031180320652880d095ffbc31320111"
    assert is_release(payload)


def test_only_a_release_record_counts_as_release() -> None:
    others = [control(P1, 3, 101, TIME_MS, kind).encode() for kind in (EntryKind.EPOCH_START, EntryKind.EMPTY)]
    unreadable = b"\xff\xff"
    put = Entry(P1, 1, 1, TIME_MS, bytes((CREATE,)))
    put.keys, put.values = [b"a"], [b"1"]
    assert not any(map(is_release, (*others, unreadable, put.encode(), b"")))


def test_release_record_of_another_format_does_not_skip_the_wait() -> None:
    message = entry_pb2.Entry.FromString(control(P1, 3, 101, TIME_MS, EntryKind.RELEASE_LEAD).encode())
    message.format = 2
    assert not is_release(message.SerializeToString())


def test_entry_of_an_unknown_format_is_refused_by_number() -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    message.format = 7
    with pytest.raises(Corrupted, match="format 7"):
        decode(message.SerializeToString())


@pytest.mark.parametrize(
    "kinds",
    [
        b"\x09",
        bytes((EntryKind.IMPORT_BEGIN,)),
        bytes((CREATE, EntryKind.RELEASE_LEAD)),
        b"\x80",
        bytes((CREATE | 0x80,)),
    ],
)
def test_unknown_kind_is_refused(kinds: bytes) -> None:
    message = entry_pb2.Entry(format=1, partition="p1", kinds=kinds, keys=[b"a"] * len(kinds), values=[b"1"])
    with pytest.raises(Corrupted):
        decode(message.SerializeToString())


@pytest.mark.parametrize("column", ["keys", "values", "ages", "expires_ms", "replaced_ms"])
def test_columns_inconsistent_with_kinds_are_refused(column: str) -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    getattr(message, column).pop()
    with pytest.raises(Corrupted, match="columns"):
        decode(message.SerializeToString())


@pytest.mark.parametrize("column", ["first_unacked", "seen_ms", "client", "hashes", "mutations", "results", "touched"])
def test_inconsistent_request_columns_are_refused(column: str) -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    getattr(message.requests, column).pop()
    with pytest.raises(Corrupted, match="request"):
        decode(message.SerializeToString())


def test_request_of_an_absent_mutation_is_refused() -> None:
    message = entry_pb2.Entry.FromString(full_entry().encode())
    message.requests.mutations[1] = 4
    with pytest.raises(Corrupted, match="mutation"):
        decode(message.SerializeToString())


@given(st.binary(max_size=200))
def test_undecodable_bytes_raise_corrupted_only(payload: bytes) -> None:
    with contextlib.suppress(Corrupted):
        decode(payload)


def test_mutation_takes_its_share_of_each_column() -> None:
    assert list(full_entry().mutations()) == [
        Mutation(CREATE, Seq(100), b"a", b"1", 100, TIME_MS + 5, 0),
        Mutation(OVERWRITE, Seq(101), b"b", b"22", 94, 0, TIME_MS + 9),
        Mutation(DELETE, Seq(102), b"c", b"", 102, 0, 0),
        Mutation(NOTE, Seq(103), b"d", b"", 103, 0, 0),
    ]


def test_control_records_take_no_sequence() -> None:
    record = decode(control(P1, 3, 101, TIME_MS, EntryKind.EMPTY).encode())
    assert (record.is_control, record.first_seq, record.last_seq) == (True, 101, 100)
    assert full_entry().last_seq == 103


def test_single_put_with_expiry_is_no_control_record() -> None:
    entry = Entry(P1, 3, 100, TIME_MS, bytes((CREATE | EXPIRES,)))
    assert not entry.is_control


GOLDEN = (
    "080112027031180320642880d095ffbc313204214203043a01613a01623a01633a0164420131420232324a0107520685d095"
    "ffbc315a0689d095ffbc3162610a10787878787878787878787878787878780a107979797979797979797979797979797912"
    "0204011a0cfecf95ffbc31ffcf95ffbc31220200012a0205013210000000000000008002000000000000003a020103420042"
    "01724a004a04747474747207086315efbeadde"
)
