"""A list of ledgers and its bytes, short and long (docs/protocol.md, G21)."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import UndecodableNode
from kvstore.meta import codec
from kvstore.types import EntryId, LedgerId, Seq
from kvstore.wal.ledger_list import GROW_FROM, GROW_STEP, GROWTH_MAX, LedgerList, Listed, LogEnd
from kvstore.wal.list_codec import PLAIN_MAX, decode, encode
from kvstore.wal.lists import CROWDED_BYTES, LIST_BYTES_MAX


def long(count: int) -> LedgerList:
    """As a year of a busy cluster leaves it."""
    lines = tuple(
        Listed(LedgerId(7 + 37 * n + n % 11), Seq(1000 * n + n * n % 977), n % 5 > 0, 1 + n // 3, 500)
        for n in range(count)
    )
    ends = LogEnd(LedgerId(3), EntryId(4)), LogEnd(LedgerId(900), EntryId(7))
    return LedgerList(1 + count // 3, lines, Seq(5), *ends)


def test_short_list_is_written_as_plain_json() -> None:
    assert encode(long(PLAIN_MAX)) == codec.encode(long(PLAIN_MAX))
    assert decode(encode(long(PLAIN_MAX)), what="x") == long(PLAIN_MAX)


def test_long_list_has_golden_bytes() -> None:
    document = json.loads(encode(long(PLAIN_MAX + 1)))
    assert (document["format"], document["count"], document["epoch"]) == (2, 501, 168)
    assert (document["trimmed_seq"], document["trimmed_end"]) == (5, {"ledger": 3, "entry": 4})
    assert document["closed_end"] == {"ledger": 900, "entry": 7}
    columns = zlib.decompress(base64.b64decode(document["packed"]))
    assert len(columns) == 5 * 8 * 501
    assert columns[:16].hex() == "07000000000000002600000000000000", "the first id, and how much the second is above it"


@pytest.mark.parametrize("count", [PLAIN_MAX + 1, 13_465, 20_000])
def test_long_list_reads_back_far_below_its_limit(count: int) -> None:
    data = encode(long(count))
    assert decode(data, what="x") == long(count)
    assert len(data) < CROWDED_BYTES


number = st.integers(-(1 << 62), 1 << 61)


@given(st.lists(st.tuples(number, number, st.booleans(), number, number), min_size=1, max_size=20))
def test_list_codec_reads_any_numbers_back(rows: list[tuple[int, int, bool, int, int]]) -> None:
    some = tuple(Listed(LedgerId(a // 4), Seq(b // 4), c, d // 4, e // 4) for a, b, c, d, e in rows)
    listed = LedgerList(3, some * (PLAIN_MAX // len(some) + 1))
    assert decode(encode(listed), what="x") == listed


@pytest.mark.parametrize(
    "change",
    [
        {"packed": base64.b64encode(b"nonsense").decode()},
        {"packed": base64.b64encode(zlib.compress(b"\0" * 8)).decode()},
        {"packed": base64.b64encode(zlib.compress(b"\0" * (1 << 20))).decode()},
        {"packed": base64.b64encode(zlib.compress(b"\0" * 40)[:-1]).decode()},
        {"count": 0},
        {"count": 1 << 40},
        {"format": 3},
    ],
    ids=str,
)
def test_list_that_cannot_be_decompressed_is_refused(change: dict[str, object]) -> None:
    good = {"format": 2, "packed": base64.b64encode(zlib.compress(b"\0" * 40)).decode(), "count": 1}
    assert len(decode(json.dumps(good).encode(), what="x").ledgers) == 1
    with pytest.raises(UndecodableNode, match="x"):
        decode(json.dumps({**good, **change}).encode(), what="x")


def test_longer_list_gets_larger_ledgers() -> None:
    grown = [long(count).growth for count in (1, GROW_FROM, GROW_FROM + 1, GROW_FROM + GROW_STEP, 2_001, 100_000)]
    assert grown == [1, 1, 2, 2, 8, GROWTH_MAX]


def test_full_list_stays_far_below_zookeepers_limit() -> None:
    assert LIST_BYTES_MAX * 2 <= 1 << 20
