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
from kvstore.spark.snapshots.directory import explaining_full_disk, write_durably
from kvstore.spark.snapshots.manifest import DataFile, SnapshotKind
from kvstore.spark.snapshots.remote import Location, local_copy_of
from kvstore.spark.snapshots.table import TableWriter, columns_of
from kvstore.spark.snapshots.work import SnapshotPart, note_of
from kvstore.types import Position

PAGE_BYTES = 256 << 10
"""Bytes that a task requests from a server at a time. The server needs half a millisecond to build such a page, and
other calls wait meanwhile."""
BATCH_BYTES = 1 << 20
"""Bytes of one record batch."""
PATIENCE_S = 60.0
"""Seconds for which a task searches for a replica that answers before the task fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """The parameters of a job that are the same for all tasks. Spark sends it to each task."""

    attempts: Location
    """The directory to which tasks write the files of their attempts."""
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
    """Load the libraries into a worker that its first file and its first channel need."""
    table = columns_of("", [b""], [b""], [0], [0], [0], [0])
    with pq.ParquetWriter(pa.BufferOutputStream(), table.schema, compression="zstd") as writer:
        writer.write_batch(table)


def write_piece(job: JobContext, piece: SnapshotPart, check: Callable[[], None] = lambda: None) -> DataFile:
    """Write one part of a snapshot to a file, and return the file's entry for a manifest, under the name of the
    attempt.

    Calls `check` regularly; `check` cancels the write by raising an error. The file of a failed attempt is removed.
    """
    name = f"{piece.name}.{uuid4().hex}"
    with local_copy_of(job.attempts / f"{name}.parquet") as path, explaining_full_disk(_place_of_disk(job, path)):
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


def _place_of_disk(job: JobContext, path: Path) -> Location:
    """Return the place to name in an error about a full disk."""
    return job.attempts.parent.parent if path.parent == job.attempts else path.parent


def paced(batches: Iterator[pa.RecordBatch], bytes_per_s: float) -> Iterator[pa.RecordBatch]:
    """Yield the batches at most at this rate; 0 means no limit."""
    due = time.monotonic()
    for batch in batches:
        yield batch
        if bytes_per_s:
            due = max(due + batch.nbytes / bytes_per_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def batches(job: JobContext, piece: SnapshotPart) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part. Every call yields the same rows in the same order."""
    if job.kind is SnapshotKind.INCREMENTAL and not piece.intents_only:
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
    pages = read_pinned(split, intents_only=piece.intents_only, page_bytes=PAGE_BYTES, patience_s=PATIENCE_S)
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
    """Yield the changes of a partition with sequences in (`after`, `until`], in log order. `servers` are asked
    first, best first; `instance` is the cluster's instance id. Raises PositionTrimmed."""
    with FeedReader(cluster, instance) as feed:
        for page in pages_between(feed, partition, after, until, servers=servers, patience_s=PATIENCE_S):
            yield batch_of(page, partition, COLUMNS)
