"""Converts rows of a snapshot to and from Parquet files with page checksums (docs/reference/formats.md, Snapshots).

Files are processed by row group, so a file of any size needs bounded memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.client.pinned.arrow import SCHEMA, TIMESTAMP, times_of
from kvstore.env.files.private import private_opener
from kvstore.errors import Corrupted, Unavailable
from kvstore.spark.snapshots.manifest import DataFile
from kvstore.spark.snapshots.pages import check_pages
from kvstore.spark.snapshots.stored import StoredFile

GROUP_BYTES = 16 << 20
GROUP_ROWS_MAX = 1 << 17
"""Maximum number of rows of a row group. A row group ends with the batch that reaches this limit or the limit of
bytes."""
READ_GROUP_BYTES_MAX, READ_GROUP_ROWS_MAX = 64 << 20, 1 << 20
"""Maximum unpacked bytes and rows of one row group that a reader accepts. The writer stays below a third of these
bytes."""
NAME_BYTES_MAX = 256
"""Maximum bytes of the name of a partition."""
BATCH_ROWS_MAX = 1 << 16
BATCH_BYTES = 4 << 20
"""Approximate bytes of the batches that readers return; a single row may be larger."""
SYNC_BYTES = 1 << 20
"""Number of bytes after which a file is synced while it is written. Syncs of other files, such as a journal, wait
for this sync, so it must be short."""
_CHUNK_BYTES = 1 << 20
_ENCODINGS = frozenset({"PLAIN", "RLE", "BIT_PACKED"})
_DICTIONARY_ENCODINGS = _ENCODINGS | {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}


class TableWriter:
    """Writes one Parquet file of a snapshot. A file that was not closed properly has no footer and is in no
    manifest."""

    def __init__(self, path: Path, partition: str, *, compression: str = "zstd") -> None:
        self._path, self._partition = path, partition
        self._file = open(path, "xb", opener=private_opener)  # noqa: SIM115 - closed by `close` or `abandon`
        self._sink = _Hashing(self._file)
        self._writer = pq.ParquetWriter(
            self._sink,
            SCHEMA,
            version="2.6",
            compression=compression,
            compression_level=1 if compression == "zstd" else None,
            use_dictionary=["partition"],
            write_statistics=["version", "written_at"],  # statistics of keys and values would be as large as these
            write_page_checksum=True,
        )
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._rows = self._deletes = 0
        self._keys: list[tuple[bytes, bytes]] = []
        self._versions: list[tuple[int, int]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch of rows with the columns of SCHEMA. The batch may have any size."""
        if not batch.num_rows:
            return
        self._rows += batch.num_rows
        self._deletes += batch["value"].null_count
        self._keys = [_widest([*self._keys, _bounds(batch["key"])])]
        self._versions = [_widest([*self._versions, _bounds(batch["version"])])]
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= GROUP_BYTES or self._waiting_rows >= GROUP_ROWS_MAX:
            self._flush()

    def close(self, name: str) -> DataFile:
        """Finish and sync the file. Returns its entry for a manifest, under the path `name`. Raises OSError."""
        self._flush()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return DataFile(
            path=name,
            partition=self._partition,
            rows=self._rows,
            deletes=self._deletes,
            size_bytes=self._sink.written,
            sha256=self._sink.hash.hexdigest(),
            min_key=self._keys[0][0] if self._keys else None,
            max_key=self._keys[0][1] if self._keys else None,
            min_version=self._versions[0][0] if self._versions else 0,
            max_version=self._versions[0][1] if self._versions else 0,
        )

    def abandon(self) -> None:
        """Remove the unfinished file."""
        with suppress(Exception):  # it would otherwise write its footer later, to a closed file
            self._writer.close()
        with suppress(OSError):  # a full disk cannot take the buffer either
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, SCHEMA), row_group_size=self._waiting_rows)
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0


class _Hashing:
    """A file for writing that hashes and counts the bytes that are written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.written = self._synced = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.written += len(data)
        taken = self._file.write(data)
        if self.written - self._synced >= SYNC_BYTES:
            self._synced = self.written
            self._file.flush()
            os.fdatasync(self._file.fileno())
        return taken

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self.written

    def close(self) -> None:
        """Do nothing: the opener closes the file after it is synced."""
        self.closed = True


def _bounds(column: Any) -> tuple[Any, Any]:
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def _widest(bounds: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def read_table(stored: StoredFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in order, in batches of some MiB, after checking every page's checksum. Sizes are
    checked before any row is read, so that memory is bounded. Raises Corrupted, Unavailable, OSError."""
    path = stored.path
    try:
        with stored.open() as source:
            footer = pq.read_metadata(source)
            _check_footer(stored, footer)
            with pq.ParquetFile(
                source,
                metadata=footer,
                read_dictionary=["partition"],
                page_checksum_verification=True,
                memory_map=False,
            ) as file:
                for group in range(footer.num_row_groups):
                    found = footer.row_group(group)
                    check_pages(source, found, str(path), bytes_max=READ_GROUP_BYTES_MAX, with_dictionary="partition")
                    each = max(1, found.total_byte_size // max(1, found.num_rows))
                    rows = min(BATCH_ROWS_MAX, max(1, BATCH_BYTES // each))
                    for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                        yield _as_written(stored, batch)
    except MemoryError as error:  # of Arrow, too
        raise Unavailable(f"{path} cannot be read: not enough memory: {error}") from None
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # an error of the system, not of the bytes; Arrow's own errors have no errno
        raise Corrupted(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _check_footer(stored: StoredFile, footer: Any) -> None:
    """Raise Corrupted for a file that `TableWriter` cannot have written: one that would need more memory than its size
    because values are shared (a dictionary, common prefixes), or that has too large row groups."""
    path = stored.path
    if not footer.schema.to_arrow_schema().equals(SCHEMA):
        raise Corrupted(f"{path}: expected the columns of a snapshot, got others")
    if footer.num_rows != stored.file.rows:
        raise Corrupted(f"{path}: expected {stored.file.rows} rows as in the manifest, got {footer.num_rows}")
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        columns = [group.column(each) for each in range(group.num_columns)]
        size = max(group.total_byte_size, sum(each.total_uncompressed_size for each in columns))
        if size > READ_GROUP_BYTES_MAX or group.num_rows > READ_GROUP_ROWS_MAX:
            raise Corrupted(
                f"{path}: expected row groups of at most {READ_GROUP_BYTES_MAX} bytes and {READ_GROUP_ROWS_MAX} rows, "
                f"got {size} bytes and {group.num_rows} rows"
            )
        for column in columns:
            allowed = _DICTIONARY_ENCODINGS if column.path_in_schema == "partition" else _ENCODINGS
            if others := set(column.encodings) - allowed:
                raise Corrupted(
                    f"{path}: expected the encodings {', '.join(sorted(allowed))} in column {column.path_in_schema}, "
                    f"got {', '.join(sorted(others))}"
                )


def _as_written(stored: StoredFile, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with names of partitions as strings. They are read as a dictionary, because few bytes of a file
    can stand for a long name in every row. Raises Corrupted for a batch that is larger than its file states."""
    names = batch["partition"].dictionary
    longest = pc.max(pc.binary_length(names)).as_py() or 0
    if longest > NAME_BYTES_MAX or batch.nbytes > READ_GROUP_BYTES_MAX:
        raise Corrupted(f"{stored.path}: its rows are larger than its footer states")
    columns = [batch[each].cast(pa.string()) if each == "partition" else batch[each] for each in SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def sha256_of(stored: StoredFile) -> str:
    """Return the SHA-256 of a file as hexadecimal digits. Raises OSError, and Corrupted for the reasons of
    `StoredFile.open`."""
    digest = hashlib.sha256()
    with stored.open() as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def columns_of(
    partition: str, keys: Any, values: Any, versions: Any, created: Any, written_ms: Any, expires_ms: Any
) -> pa.RecordBatch:
    """Build a batch of rows from columns. Times are in milliseconds; an expiry of 0 means that the row never
    expires."""
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(partition), len(keys)),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            pa.array(versions, pa.int64()),
            pa.array(created, pa.int64()),
            pc.multiply(pa.array(written_ms, pa.int64()), 1000).cast(TIMESTAMP),
            times_of(np.asarray(expires_ms, np.int64)),
        ],
        schema=SCHEMA,
    )
