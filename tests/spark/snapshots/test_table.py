"""Rows into Parquet and back, in bounded memory, with every page checked."""

import hashlib
import io
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client.pinned.arrow import SCHEMA
from kvstore.errors import Corrupted, Unavailable
from kvstore.partition.state.operations import EXPIRES_MS_MAX
from kvstore.spark.snapshots import pages, table
from kvstore.spark.snapshots.manifest import DataFile
from kvstore.spark.snapshots.stored import StoredFile
from kvstore.spark.snapshots.table import TableWriter, columns_of, read_table, sha256_of

rows = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=20),
        st.none() | st.binary(max_size=50),
        st.integers(1, 2**62),
        st.integers(0, 2**62),
        st.integers(0, 2**42),
        st.integers(0, 2**42),
    ),
    max_size=30,
)


def batch(made: list) -> pa.RecordBatch:
    return columns_of("p1", *(list(column) for column in (zip(*made, strict=True) if made else [[]] * 6)))


@given(st.lists(rows, max_size=4))
@settings(max_examples=50, deadline=None)
def test_written_snapshot_is_read_and_described(tmp_path_factory: pytest.TempPathFactory, parts: list[list]) -> None:
    path = tmp_path_factory.mktemp("table") / "x.parquet"
    writer = TableWriter(path, "p1")
    for part in parts:
        writer.write(batch(part))
    file = writer.close("data/x.parquet")
    every = [row for part in parts for row in part]
    read = pa.Table.from_batches(read_table(StoredFile(path, file)), SCHEMA)
    assert read == pa.Table.from_batches([batch(every)], SCHEMA)
    assert (file.rows, file.deletes) == (len(every), sum(row[1] is None for row in every))
    assert (file.min_key, file.max_key) == (
        (min(row[0] for row in every), max(row[0] for row in every)) if every else (None, None)
    )
    assert (file.min_version, file.max_version) == (
        (min(row[2] for row in every), max(row[2] for row in every)) if every else (0, 0)
    )
    data = path.read_bytes()
    assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert sha256_of(StoredFile(path, file)) == file.sha256


def test_expiry_is_none_or_a_time_and_is_capped_at_the_last_timestamp() -> None:
    made = batch([(b"k", b"v", 1, 1, 1_000, expires_ms) for expires_ms in (0, 1_500, EXPIRES_MS_MAX)])
    found = [row["expires_at"] for row in made.to_pylist()]
    assert found == [None, datetime.fromtimestamp(1.5, UTC), datetime(9999, 12, 30, tzinfo=UTC)]


def test_incomplete_file_on_a_full_disk_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    writer = TableWriter(path, "p1")
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), writer._file.fileno())
    writer.write(batch([(b"k", b"v", 1, 1, 1, 0)]))
    with pytest.raises(OSError, match="No space left"):
        writer.close("data/x.parquet")
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_expiry_of_zero_is_none() -> None:
    made = batch([(b"a", b"1", 1, 1, 5, 0), (b"b", b"2", 2, 2, 5, 7)])
    assert [each and each.timestamp() for each in made["expires_at"].to_pylist()] == [None, 0.007]


def test_large_values_stay_in_small_groups(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / "x.parquet", "p1")
    for number in range(40):
        writer.write(batch([(b"%d" % number, bytes(1 << 20), number + 1, 1, 1, 0)]))
    file = writer.close("x")
    groups = pq.ParquetFile(tmp_path / "x.parquet").metadata
    sizes = [groups.row_group(each).total_byte_size for each in range(groups.num_row_groups)]
    assert max(groups.row_group(each).num_rows for each in range(groups.num_row_groups)) <= 17
    assert len(sizes) >= 3
    assert max(each.nbytes for each in read_table(StoredFile(tmp_path / "x.parquet", file))) <= table.GROUP_BYTES + (
        2 << 20
    )


def test_many_small_rows_stay_in_groups_of_a_bounded_number(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / "x.parquet", "p1")
    some = batch([(b"k", b"", number + 1, 1, 1, 0) for number in range(50_000)])
    for _ in range(8):
        writer.write(some)
    writer.close("x")
    groups = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert [groups.row_group(each).num_rows for each in range(groups.num_row_groups)] == [150_000, 150_000, 100_000]


def test_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    writer = TableWriter(path, "p1", compression="none")
    writer.write(batch([(b"key", b"needle" * 10, 1, 1, 1, 0)]))
    file = writer.close("x")
    data = path.read_bytes()
    assert data.count(b"needle" * 10) == 1
    path.write_bytes(data.replace(b"needle" * 10, b"noodle" * 10))
    with pytest.raises(Corrupted, match=r"damaged: .*(CRC|checksum)"):
        list(read_table(StoredFile(path, file)))


def test_file_that_needs_more_memory_than_there_is_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    writer = TableWriter(path, "p1")
    writer.write(batch([(b"key", b"value", 1, 1, 1, 0)]))
    stored = StoredFile(path, writer.close("x"))

    def starved(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 16777216 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", starved)
    with pytest.raises(Unavailable, match="not enough memory"):
        list(read_table(stored))


def test_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(Corrupted, match="expected the columns of a snapshot"):
        list(read_table(stored_as_told(tmp_path / "x.parquet")))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dictionary": ["partition", "value"]}, "expected the encodings .* in column value, got .*DICTIONARY"),
        (
            {"use_dictionary": ["partition"], "column_encoding": {"value": "DELTA_BYTE_ARRAY"}},
            "in column value, got DELTA_BYTE_ARRAY",
        ),
        ({"use_dictionary": ["partition"]}, "expected row groups of at most 67108864 bytes .*, got 104[0-9]* bytes"),
    ],
)
def test_row_group_too_large_for_memory_is_refused(tmp_path: Path, options: dict, reason: str) -> None:
    path = tmp_path / "x.parquet"
    made = batch([(b"%d" % number, bytes(1 << 20), number + 1, 1, 1, 0) for number in range(100)])
    pq.write_table(pa.Table.from_batches([made]), path, compression="zstd", **options)
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(Corrupted, match=reason):
        list(read_table(stored_as_told(path)))
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": ["partition", "value"]},
        {"use_dictionary": ["partition"], "column_encoding": {"value": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": ["partition"]},
        {"use_dictionary": ["partition"], "data_page_version": "2.0"},
    ],
)
def test_pages_are_refused_by_their_headers_if_the_footer_has_no_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    """As with a changed footer: it is not read here."""
    path = tmp_path / "x.parquet"
    made = batch([(b"%d" % number, bytes(1 << 20), number + 1, 1, 1, 0) for number in range(100)])
    pq.write_table(pa.Table.from_batches([made]), path, compression="zstd", **options)
    monkeypatch.setattr(table, "_check_footer", lambda *_: None)
    before = pa.total_allocated_bytes()
    with pytest.raises(Corrupted, match=r"expected (plain pages in column|row groups of at most 67108864 bytes)"):
        list(read_table(stored_as_told(path)))
    assert pa.total_allocated_bytes() - before < 1 << 20


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_page_header_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(Corrupted):
        pages._header_at(io.BytesIO(data), 0, "x")


def test_long_name_of_a_partition_is_not_repeated_in_every_row(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    made = columns_of("p" * (1 << 20), [b"k"] * 8, [b"v"] * 8, [1] * 8, [1] * 8, [1] * 8, [0] * 8)
    pq.write_table(pa.Table.from_batches([made]), path, compression="zstd", use_dictionary=["partition"])
    with pytest.raises(Corrupted, match="larger than its footer states"):
        list(read_table(stored_as_told(path)))


def stored_as_told(path: Path) -> StoredFile:
    """Return the file with a manifest entry that agrees with it, as after a deliberate change of both."""
    with pq.ParquetFile(path) as file:
        rows = file.metadata.num_rows
    data = path.read_bytes()
    return StoredFile(
        path,
        DataFile(
            path="data/x.parquet",
            partition="p1",
            rows=rows,
            deletes=0,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            min_key=b"",
            max_key=b"",
            min_version=1,
            max_version=1,
        ),
    )


def test_abandoned_attempt_leaves_nothing(tmp_path: Path) -> None:
    writer = TableWriter(tmp_path / "x.parquet", "p1")
    writer.write(batch([(b"a", b"1", 1, 1, 5, 0)]))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
