"""The bytes of auto-recovery's nodes, as Apache BookKeeper has them."""

import pytest

from kvstore.errors import Corrupted
from kvstore.meta import marks, paths
from kvstore.meta.marks import LedgerMark
from kvstore.meta.store import Stat
from kvstore.types import BookieId, LedgerId

B1, B2 = BookieId("b1-1"), BookieId("127.0.0.1:3181")
STAT = Stat(version=3, created=9, owner=0, modified_ms=0)
SEVEN = LedgerId(7)


def test_mark_bytes_are_apaches() -> None:
    assert marks.encode_layout() == b'type: "BASIC"\nversion: 1\n'
    assert marks.encode_mark([B1, B2], 1700000000123) == (
        b'replica: "b1-1"\nreplica: "127.0.0.1:3181"\nctime: 1700000000123\n'
    )
    assert marks.encode_lock("n1") == marks.encode_vote("n1") == b'bookieId: "n1"\n'
    assert marks.encode_delay(60) == b"60"
    assert marks.encode_checked(1700000000123) == bytes.fromhex("08fbd095ffbc31")


def test_written_marks_are_read_back() -> None:
    assert marks.decode_layout(marks.encode_layout(), what="L") == ("BASIC", 1)
    data = marks.encode_mark([B1, B2], 5)
    assert marks.decode_mark(SEVEN, data, STAT) == LedgerMark(SEVEN, (B1, B2), 5, version=3, created=9)
    assert marks.decode_lock(b'bookieId: "host"\n', what="l") == "host"
    assert marks.decode_lock(b"", what="l") == "", "Apache's, on a host whose name is not known"
    assert marks.decode_vote(marks.encode_vote("n1"), what="v") == "n1"
    assert marks.decode_delay(b" 90\n", what="d") == 90
    assert marks.decode_checked(marks.encode_checked(5), what="c") == 5


# docs/protocol.md A1
def test_unreadable_mark_still_names_its_ledger() -> None:
    for data in (b"\xff\xfe", b"replica: ", b"replica: 5\n", b"{" * 10_000):
        assert marks.decode_mark(SEVEN, data, STAT) == LedgerMark(SEVEN, (), 0, version=3, created=9)


@pytest.mark.parametrize("data", [b"", b"-1", b"1.5", b"ten", b"2147483648", b"9" * 5_000])
def test_malformed_delay_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupted, match="2147483647"):
        marks.decode_delay(data, what="delay")


@pytest.mark.parametrize("seconds", [-1, 2**31])
def test_delay_that_apaches_tools_cannot_read_is_not_written(seconds: int) -> None:
    with pytest.raises(ValueError, match=str(seconds)):
        marks.encode_delay(seconds)


def test_bytes_of_other_nodes_are_refused_by_name() -> None:
    for decode in (marks.decode_layout, marks.decode_lock, marks.decode_vote, marks.decode_checked):
        with pytest.raises(Corrupted, match="what it was"):
            decode(b"\x08", what="what it was")


def test_mark_has_apaches_path() -> None:
    base = "/ledgers/underreplication"
    assert paths.mark(LedgerId(123456789)) == f"{base}/ledgers/0000/0000/075b/cd15/urL0123456789"
    assert paths.mark(LedgerId(2**63 - 1)) == f"{base}/ledgers/7fff/ffff/ffff/ffff/urL9223372036854775807"
    assert paths.mark_lock(LedgerId(123456789)) == f"{base}/locks/urL0123456789"
    for ledger in (0, 7, 123456789, 2**31, 2**40, 2**63 - 1):
        assert paths.marked_of(paths.mark(LedgerId(ledger))) == ledger
    for path in (f"{base}/ledgers/0000", f"{base}/ledgers/0000/0000/0000/0008/urL0000000007", f"{base}/ledgers"):
        assert paths.marked_of(path) is None
    for outside in (-1, 2**63):
        with pytest.raises(ValueError, match=str(outside)):
            paths.mark(LedgerId(outside))
