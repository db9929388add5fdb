"""The work of an executor: reads one part of a snapshot, at its pinned position or from the log, and writes one file.

Tasks are retried and may run twice. Each attempt writes its own file, and the driver decides which one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import COLUMNS, batches_of
from kvstore.client.pinned.pins import Split
from kvstore.client.pinned.read import read_pinned
from kvstore.spark.changes import batch_of, pages_between
from kvstore.spark.snapshots.directory import room_at, write_durably
from kvstore.spark.snapshots.manifest import DataFile, SnapshotKind
from kvstore.spark.snapshots.remote import Location, local_copy_of
from kvstore.spark.snapshots.table import TableWriter, columns_of
from kvstore.spark.snapshots.work import SnapshotPart, note_of
from kvstore.types import Position

PAGE_BYTES = 256 << 10
"""Bytes that a server reads at a time. It builds such a page in half a millisecond, during which other calls wait."""
BATCH_BYTES = 1 << 20
"""Bytes of one record batch."""
PATIENCE_S = 60.0
"""Seconds for which a task looks for a replica before it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The part of a job that is the same for all tasks. It is sent to each task."""

    attempts: Location
    """The directory to write to."""
    kind: SnapshotKind
    pin: str
    positions: dict[str, Position]
    compression: str
    cluster: ClientConfig
    instance: str = ""
    """The cluster's instance id."""
    bytes_per_s: float = 0.0
    """Maximum bytes per second of one task; 0 means no limit."""


def load_libraries(_: object) -> None:
    """Load everything into a worker that the first file and the first channel need."""
    table = columns_of("", [b""], [b""], [0], [0], [0], [0])
    with pq.ParquetWriter(pa.BufferOutputStream(), table.schema, compression="zstd") as writer:
        writer.write_batch(table)


def write_piece(job: JobContext, piece: SnapshotPart, check: Callable[[], None] = lambda: None) -> DataFile:
    """Write one part to a file. Return its entry, named as among the attempts. A failed attempt's file is removed.
    `check` is called regularly and cancels the write by raising an error."""
    name = f"{piece.name}.{uuid4().hex}"
    with local_copy_of(job.attempts / f"{name}.parquet") as path, room_at(_room_of(job, path)):
        writer = TableWriter(path, piece.partition, compression=job.compression)
        try:
            for batch in paced(batches(job, piece), job.bytes_per_s):
                check()
                writer.write(batch)
            file = writer.close(path.name)
            if path.parent == job.attempts:
                write_durably(job.attempts / f"{name}.json", note_of(file))
        except BaseException:
            writer.abandon()
            raise
    if path.parent != job.attempts:
        write_durably(
            job.attempts / f"{name}.json", note_of(file)
        )  # the file was uploaded only at the end of the block
    return file


def _room_of(job: JobContext, path: Path) -> Location:
    """Return the place to name in an error about a full disk."""
    return job.attempts.parent.parent if path.parent == job.attempts else path.parent


def paced(batches: Iterator[pa.RecordBatch], bytes_per_s: float) -> Iterator[pa.RecordBatch]:
    """Yield the batches no faster than the rate allows."""
    due = time.monotonic()
    for batch in batches:
        yield batch
        if bytes_per_s:
            due = max(due + batch.nbytes / bytes_per_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def batches(job: JobContext, piece: SnapshotPart) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part, always the same rows in the same order."""
    if job.kind is SnapshotKind.INCREMENTAL:
        yield from changes(job.cluster, piece.partition, piece.first, piece.last, piece.servers, instance=job.instance)
        return
    split = Split(
        job.pin,
        piece.partition,
        job.positions[piece.partition],
        piece.first,
        piece.last,
        piece.servers,
        piece.rows,
        0,
        job.cluster.tls,
    )
    pages = read_pinned(split, page_bytes=PAGE_BYTES, patience_s=PATIENCE_S)
    yield from batches_of(pages, piece.partition, BATCH_BYTES)


def changes(
    cluster: ClientConfig,
    partition: str,
    after: int,
    until: int,
    servers: tuple[str, ...] = (),
    *,
    instance: str = "",
) -> Iterator[pa.RecordBatch]:
    """Yield the log between two sequences. Raises PositionTrimmed."""
    with FeedReader(cluster, instance) as feed:
        for page in pages_between(feed, partition, after, until, servers=servers, patience_s=PATIENCE_S):
            yield batch_of(page, partition, COLUMNS)
