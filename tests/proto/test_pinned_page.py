"""Pages of pinned reads: their bytes, and how they are decoded with and without Arrow."""

from random import Random

import pytest

from kvstore.client.pinned.arrow import COLUMNS, batch_of
from kvstore.client.pinned.read import SplitPage
from kvstore.errors import Corrupted
from kvstore.partition.state import rows
from kvstore.proto import data_pb2, pinned_page
from kvstore.proto.pinned_page import PinnedRow
from kvstore.ring.hashing import MURMUR3

NOW_MS = 5_000


def made(records: list[PinnedRow], *, time_ms: int = NOW_MS) -> data_pb2.PinnedPage:
    keys = [rows.data_key(MURMUR3, each.key) for each in records]
    stored = [rows.encode_record(each.value, *each[2:]) for each in records]
    return pinned_page.encode(keys, stored, time_ms, keys[-1] if keys else b"", ends=False)


def drawn(seed: int, count: int) -> list[PinnedRow]:
    random = Random(seed)
    found = []
    for number in range(count):
        version = random.randrange(1, 1 << 60)
        created = random.choice((version, random.randrange(1, version + 1)))
        expires_ms = random.choice((0, 0, random.randrange(1, 2 * NOW_MS)))
        value = random.randbytes(random.choice((0, 1, 7, 8, 9, 100)))
        found.append(PinnedRow(b"k%d" % number, value, version, created, random.randrange(1 << 40), expires_ms))
    return found


def live(records: list[PinnedRow]) -> list[PinnedRow]:
    return [each for each in records if not 0 < each.expires_ms <= NOW_MS]


def test_pinned_page_has_golden_bytes() -> None:
    page = made([PinnedRow(b"a", b"v", 7, 7, 9, 0), PinnedRow(b"bc", b"", 8, 5, 9, 6000)], time_ms=0)
    assert page.SerializeToString().hex() == GOLDEN


def test_pinned_page_round_trips_without_expired_records() -> None:
    records = drawn(1, 500)
    page = data_pb2.PinnedPage.FromString(made(records).SerializeToString())
    assert list(pinned_page.rows_of(pinned_page.columns_of(page))) == live(records)
    assert len(live(records)) < len(records)


def test_pinned_page_without_expired_records_returns_all() -> None:
    records = drawn(2, 100)
    assert list(SplitPage.of(made(records, time_ms=0)).rows()) == records


def test_arrow_has_nulls_for_deleted_keys() -> None:
    keys = [rows.data_key(MURMUR3, key) for key in (b"a", b"b", b"c")]
    stored = [rows.encode_record(b"v", 7, 5, 9, 0), pinned_page.deleted(8, 9), rows.encode_record(b"", 9, 9, 9, 0)]
    page = SplitPage.of(pinned_page.encode(keys, stored, 0, keys[-1], ends=True))
    table = batch_of(page, "p1").to_pydict()
    assert table["value"] == [b"v", None, b""]
    assert (table["version"], table["created_version"]) == ([7, 8, 9], [5, 0, 9])
    assert [row.is_deleted for row in page.rows()] == [False, True, False]


@pytest.mark.parametrize("records", [drawn(3, 500), drawn(4, 1), [], [PinnedRow(b"a", b"", 1, 1, 1, 0)]])
def test_arrow_has_the_same_records(records: list[PinnedRow]) -> None:
    batch = batch_of(SplitPage.of(made(records)), "p1")
    batch.validate(full=True)
    table = batch.to_pydict()
    expected = live(records)
    assert list(zip(table["key"], table["value"], table["version"], table["created_version"], strict=True)) == [
        each[:4] for each in expected
    ]
    assert [round(at.timestamp() * 1000) for at in table["written_at"]] == [each.written_ms for each in expected]
    expiries = [0 if at is None else round(at.timestamp() * 1000) for at in table["expires_at"]]
    assert expiries == [each.expires_ms for each in expected]
    assert table["partition"] == ["p1"] * len(expected)


def test_arrow_returns_the_requested_columns() -> None:
    page = SplitPage.of(made(drawn(5, 10)))
    assert batch_of(page, "p1", ["version", "key"]).schema.names == ["version", "key"]
    with pytest.raises(ValueError, match=", ".join(COLUMNS)):
        batch_of(page, "p1", ["colour"])


@pytest.mark.parametrize("column", ["keys", "key_lengths", "rows", "row_lengths"])
def test_pinned_page_with_inconsistent_columns_is_refused(column: str) -> None:
    page = made(drawn(6, 10))
    setattr(page, column, getattr(page, column)[:-1])
    with pytest.raises(Corrupted):
        pinned_page.columns_of(page)


def test_pinned_page_of_another_format_is_refused_by_number() -> None:
    page = made([])
    page.format = 2
    with pytest.raises(Corrupted, match="format 2"):
        pinned_page.columns_of(page)


def test_header_lengths_match_the_partitions_rows() -> None:
    for flags, created, expires_ms in ((0, 9, 0), (1, 5, 0), (2, 9, 1), (3, 5, 1)):
        row = rows.encode_record(b"", 9, created, 1, expires_ms)
        assert (row[0], len(row)) == (flags, pinned_page.HEADER_BYTES[flags])


GOLDEN = (
    "080110021a0d643c2569b261644f31114c626322080600000007000000"
    "2a33000000000000000007000000000000000976030000000000000008000000000000000900000000000000050000000000001770"
    "320812000000210000004207644f31114c6263"
)
