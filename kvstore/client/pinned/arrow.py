"""Pages of pinned reads as Arrow record batches, without a loop over rows. Needs the `spark` extra (pyarrow, numpy).

The joined keys and rows of a page have Arrow's own layout. A column is one slice in C, and a number in the rows'
headers is one gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.client.pinned.read import SplitPage
from kvstore.proto.pinned_page import (
    AGED,
    DELETED,
    EXPIRES,
    HEADER_BYTES,
    HEADER_BYTES_MIN,
    TOKEN_BYTES,
    PageColumns,
    joined,
)

TIMESTAMP = pa.timestamp("us", tz="UTC")
TIME_MS_MAX = 253_402_128_000_000
"""30 December 9999, in milliseconds. The store accepts expiries up to 2^62 ms, which are not valid timestamps; they
become this one, which Python's dates can show in every time zone."""
SCHEMA = pa.schema(
    [
        pa.field("partition", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("created_version", pa.int64(), nullable=False),
        pa.field("written_at", TIMESTAMP, nullable=False),
        pa.field("expires_at", TIMESTAMP),
    ]
)
"""The schema of snapshots. `value` is null if the read left values out, and in the deletes of an incremental
snapshot."""
COLUMNS = tuple(SCHEMA.names)
END = 1 << 30
"""An index behind every value. Without it Arrow computes a wrong size of the result."""
_BYTES = np.frombuffer(HEADER_BYTES, np.uint8)


def times_of(milliseconds: Any) -> Any:
    """Return milliseconds since 1970, an int64 array, as timestamps. 0 becomes null."""
    return pa.array(np.minimum(milliseconds, TIME_MS_MAX) * 1000, mask=milliseconds == 0).cast(TIMESTAMP)


def batch_of(page: SplitPage, partition: str, columns: Sequence[str] = COLUMNS) -> Any:
    """Return the records of a page as a pyarrow.RecordBatch with these columns of SCHEMA. Request `value` only if the
    page was read with values. Expired records are left out."""
    return _batch(page.columns, partition, columns)


def batches_of(pages: Iterable[SplitPage], partition: str, bytes_min: int) -> Iterator[Any]:
    """Yield the records of pages as larger batches with all columns. Each batch costs about a millisecond whatever its
    size, and servers work best with small pages."""
    gathered: list[PageColumns] = []
    size = 0
    for page in pages:
        found = page.columns
        if gathered and found.time_ms != gathered[0].time_ms:
            yield _batch(joined(gathered), partition, COLUMNS)
            gathered, size = [], 0
        gathered.append(found)
        size += len(found.keys) + len(found.rows)
        if size >= bytes_min:
            yield _batch(joined(gathered), partition, COLUMNS)
            gathered, size = [], 0
    if gathered:
        yield _batch(joined(gathered), partition, COLUMNS)


def _batch(found: PageColumns, partition: str, columns: Sequence[str]) -> Any:
    rows = _Rows(found)
    arrays = [rows.column(name, partition) for name in columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([SCHEMA.field(name) for name in columns]))
    return batch.filter(pa.array(rows.live)) if found.time_ms else batch


class _Rows:
    """The columns of one page."""

    def __init__(self, page: PageColumns) -> None:
        self._page, self._count = page, page.count
        self._offsets = _offsets(page.row_lengths)
        self._starts = self._offsets[:-1].astype(np.int64)
        self._flags = np.frombuffer(page.rows, np.uint8)[self._starts]

    def column(self, name: str, partition: str) -> Any:
        match name:
            case "partition":
                return pa.repeat(pa.scalar(partition), self._count)
            case "key":
                keys = _binary(_offsets(self._page.key_lengths), self._page.keys)
                return pc.binary_slice(keys, TOKEN_BYTES, END)
            case "value":
                return self._without_deletes(self._values())
            case "version":
                return pa.array(self._words(1))
            case "created_version":
                aged = self._flags & AGED != 0
                return pa.array(np.where(aged, self._words(HEADER_BYTES_MIN, aged), self._words(1)))
            case "written_at":
                return pa.array(self._words(9) * 1000).cast(TIMESTAMP)
            case "expires_at":
                return times_of(self._expires_ms())
        raise ValueError(f"unknown column {name!r}; expected one of {', '.join(COLUMNS)}")

    @property
    def live(self) -> Any:
        """Mask of the records that had not expired."""
        expires_ms = self._expires_ms()
        return (expires_ms == 0) | (expires_ms > self._page.time_ms)

    def _expires_ms(self) -> Any:
        expiring = self._flags & EXPIRES != 0
        return self._words(HEADER_BYTES_MIN + 8 * (self._flags & AGED).astype(np.int64), expiring)

    def _words(self, at: Any, where: Any = None) -> Any:
        """Return the numbers that are `at` bytes behind the start of each row; 0 for rows outside `where`."""
        data, places = self._page.rows, self._starts + at
        if where is not None and not where.any():
            return np.zeros(self._count, np.int64)
        if len(data) < 8:
            return np.zeros(self._count, np.int64)
        words = np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))
        if where is None:
            return words[places].astype(np.int64)
        return np.where(where, words[np.where(where, places, 0)], 0).astype(np.int64)

    def _without_deletes(self, values: Any) -> Any:
        """Return the values with nulls in rows that say that a key is deleted."""
        deleted = self._flags & DELETED != 0
        return pc.if_else(pa.array(deleted), pa.scalar(None, pa.binary()), values) if deleted.any() else values

    def _values(self) -> Any:
        rows = _binary(self._offsets, self._page.rows)
        kinds = np.unique(self._flags)
        lengths = np.unique(_BYTES[kinds])
        if len(lengths) == 0:
            return rows
        cut = [pc.binary_slice(rows, int(each), END) for each in lengths]
        if len(cut) == 1:
            return cut[0]
        return pc.choose(pa.array(np.searchsorted(lengths, _BYTES[self._flags])), *cut)


def _offsets(lengths: bytes) -> Any:
    counted = np.frombuffer(lengths, "<u4")
    offsets = np.zeros(len(counted) + 1, np.int32)
    np.cumsum(counted, out=offsets[1:])
    return offsets


def _binary(offsets: Any, joined: bytes) -> Any:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(joined)])
