from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupted
from kvstore.meta.ledger_metadata import decode, encode
from kvstore.types import (
    NO_ENTRY,
    BookieId,
    DigestType,
    EntryId,
    Fragment,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Quorum,
)

ID = LedgerId(7)
BOOKIES = tuple(BookieId(f"b{i}:3181") for i in (1, 2, 3))
LEDGER = LedgerMetadata(ID, Quorum(ensemble=3, write=2, ack=2), (Fragment(EntryId(0), BOOKIES),), token=42)
GOLDEN = bytes.fromhex(
    "426f6f6b69654d65746164617461466f726d617456657273696f6e09330a"
    "3a"
    "0802 1003 1800 20ffffffffffffffffff01 2801 321d 0a0762313a33313831 0a0762323a33313831 0a0762333a33313831 1000"
    "3803 4200 4802 602a"
)


def test_ledger_metadata_bytes_are_apaches() -> None:
    assert encode(LEDGER) == GOLDEN
    assert len(GOLDEN) == 89
    assert decode(ID, GOLDEN) == LEDGER
    assert decode(ID, GOLDEN).token == 42


def test_end_of_a_ledger_is_stored_only_when_closed() -> None:
    recovering = replace(LEDGER, state=LedgerState.IN_RECOVERY, last_entry=EntryId(5), length=99)
    assert (decode(ID, encode(recovering)).last_entry, decode(ID, encode(recovering)).length) == (NO_ENTRY, 0)
    closed = LEDGER.closed(EntryId(5), 99)
    assert (decode(ID, encode(closed)).last_entry, decode(ID, encode(closed)).length) == (5, 99)


def test_empty_ledger_closes_before_its_first_entry() -> None:
    assert decode(ID, encode(LEDGER.closed(NO_ENTRY, 0))).last_entry == NO_ENTRY


entries = st.integers(1, 2**40)


@given(
    firsts=st.sets(entries, max_size=4),
    state=st.sampled_from(LedgerState),
    last_entry=st.integers(-1, 2**60),
    length=st.integers(0, 2**60),
    digest=st.sampled_from(DigestType),
    password=st.binary(max_size=20),
    custom=st.dictionaries(st.text(max_size=9), st.binary(max_size=300), max_size=3),
    ctime_ms=st.integers(0, 2**50),
    token=st.integers(0, 2**63 - 1),
)
def test_written_metadata_are_read_back(
    firsts: set[int],
    state: LedgerState,
    last_entry: int,
    length: int,
    digest: DigestType,
    password: bytes,
    custom: dict[str, bytes],
    ctime_ms: int,
    token: int,
) -> None:
    is_closed = state is LedgerState.CLOSED
    metadata = LedgerMetadata(
        ledger=ID,
        quorum=Quorum(ensemble=3, write=3, ack=2),
        fragments=tuple(Fragment(EntryId(first), BOOKIES) for first in sorted({0, *firsts})),
        state=state,
        last_entry=EntryId(last_entry) if is_closed else NO_ENTRY,
        length=length if is_closed else 0,
        digest=digest,
        password=password,
        custom=tuple(sorted(custom.items())),
        ctime_ms=ctime_ms,
        token=token,
    )
    found = decode(ID, encode(metadata))
    assert found == metadata
    assert found.token == token


VERSION_2 = b"""BookieMetadataFormatVersion\t2
quorumSize: 2
ensembleSize: 3
length: 99
lastEntryId: 5
state: CLOSED
segment {
  ensembleMember: "b1:3181"
  ensembleMember: "b2:3181"
  ensembleMember: "b3:3181"
  firstEntryId: 0
}
digestType: HMAC
password: "pass\\000wd"
ackQuorumSize: 2
customMetadata {
  key: "owner"
  value: "\\001x"
}
"""


def test_text_of_version_2_is_read() -> None:
    expected = replace(
        LEDGER.closed(EntryId(5), 99), digest=DigestType.HMAC, password=b"pass\0wd", custom=(("owner", b"\1x"),)
    )
    assert decode(ID, VERSION_2) == expected


VERSION_1 = b"BookieMetadataFormatVersion\t1\n2\n3\n99\n0\tb1:3181\tb2:3181\tb3:3181\n4\tb1:3181\tb4:3181\tb3:3181"


@pytest.mark.parametrize(
    ("last_line", "state", "last_entry"),
    [
        (b"", LedgerState.OPEN, NO_ENTRY),
        (b"\n", LedgerState.OPEN, NO_ENTRY),
        (b"\n5\tCLOSED", LedgerState.CLOSED, 5),
        (b"\n-1\tCLOSED\n", LedgerState.CLOSED, NO_ENTRY),
        (b"\n-102\tCLOSED", LedgerState.IN_RECOVERY, NO_ENTRY),
    ],
)
def test_lines_of_version_1_are_read(last_line: bytes, state: LedgerState, last_entry: int) -> None:
    found = decode(ID, VERSION_1 + last_line)
    assert (found.state, found.last_entry) == (state, last_entry)
    assert found.quorum == Quorum(ensemble=3, write=2, ack=2)
    assert [fragment.first for fragment in found.fragments] == [0, 4]
    assert found.fragments[1].ensemble == ("b1:3181", "b4:3181", "b3:3181")
    assert found.digest is DigestType.CRC32


def test_missing_ack_quorum_means_every_write_counts() -> None:
    without_ack = GOLDEN.replace(bytes.fromhex("4802602a"), b"").replace(b"\n\x3a", b"\n\x36")
    assert decode(ID, without_ack).quorum == Quorum(ensemble=3, write=2, ack=2)


def test_unknown_metadata_version_is_refused_by_number() -> None:
    with pytest.raises(Corrupted, match="ledger 7: metadata has format version 4"):
        decode(ID, GOLDEN.replace(b"\t3\n", b"\t4\n"))


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("nothing", b""),
        ("no header", b"\x08\x02"),
        ("a header without number", b"BookieMetadataFormatVersion\tx\n"),
        ("no body", b"BookieMetadataFormatVersion\t3\n"),
        ("a body cut short", GOLDEN[:-1]),
        ("an endless length", b"BookieMetadataFormatVersion\t3\n" + b"\xff" * 20),
        ("a body that is no message", GOLDEN[:31] + b"\xff" * 58),
        ("a message without its required fields", b"BookieMetadataFormatVersion\t3\n\x02\x08\x02"),
        ("an unknown state", GOLDEN.replace(b"\x28\x01", b"\x28\x09")),
        ("a quorum that cannot be", GOLDEN.replace(b"\x08\x02\x10\x03", b"\x08\x04\x10\x03")),
        ("text that is none", b"BookieMetadataFormatVersion\t2\nquorumSize: x"),
        ("text of a thousand brackets", b"BookieMetadataFormatVersion\t2\n" + b"segment {" * 5_000),
        ("a number of a thousand digits", b"BookieMetadataFormatVersion\t" + b"3" * 5_000 + b"\n"),
        ("too few lines", b"BookieMetadataFormatVersion\t1\n2\n3"),
        ("closed without an end", VERSION_2.replace(b"lastEntryId: 5\n", b"")),
    ],
)
def test_malformed_metadata_are_reported_with_their_ledger(what: str, data: bytes) -> None:
    with pytest.raises(Corrupted, match="ledger 7"):
        decode(ID, data)
