"""Batch reads. The driver plans the read at one pinned state of the store, and tasks read parts of that state as Arrow
batches.

A part has the same rows every time it is read, so retries and speculative tasks are safe. Any replica that keeps the
pinned state can serve a part. If a replica fails, the task continues with another one. If no replica keeps the pinned
state, the job fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from kvstore.client.core.config import ClientConfig
from kvstore.client.pinned.pins import PinnedStore
from kvstore.errors import NoSuchPin
from kvstore.spark.columns import typed
from kvstore.spark.options import ReadOptions
from kvstore.spark.pins import explained, kept_alive, renew_or_explain
from kvstore.spark.splits import ReadRequest, SplitPart, Work, plan

if TYPE_CHECKING:
    from pyarrow import RecordBatch


class PinnedReader(DataSourceReader):
    """The batch reader of `spark.read.format("kvstore")`. Spark pickles it, so it has no open connections.

    The class deliberately has no `pushFilters`. Spark up to 4.3.0 plans a data frame once, with the filters of one
    scan, and reuses that plan for all scans of the data frame, so scans without these filters would miss rows. Only
    options limit the rows that are read: options belong to the data frame, so its one plan is right for all its scans.
    """

    def __init__(self, config: ClientConfig, store: PinnedStore, options: ReadOptions, *, pinned_at: float) -> None:
        """`pinned_at` is the wall-clock time at which the pin was made."""
        self._config, self._store, self._options = config, store, options
        self._wanted = ReadRequest(options.keys, options.exactly, options.partition or None)
        self._pinned_at = pinned_at

    def partitions(self) -> Sequence[InputPartition]:
        renew_or_explain(self._config, self._store, self._options.pin_ttl_s)
        return [InputPartition(work) for work in plan(self._store, self._wanted)]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        work: Work | None = partition.value
        if work is None:  # Spark passes None if there is nothing to read
            return
        try:
            with kept_alive(self._config, self._store.id, self._options.pin_ttl_s, pinned_at=self._pinned_at):
                for piece in work:
                    yield from self._batches(piece)
        except NoSuchPin as error:
            raise explained(error, self._options.pin_ttl_s) from None

    def _batches(self, piece: SplitPart) -> Iterator[RecordBatch]:
        # Import gRPC only after the fork that created this process.
        from kvstore.client.pinned.arrow import batch_of
        from kvstore.client.pinned.read import read_pinned

        options = self._options
        pages = read_pinned(
            piece.split,
            start=piece.keys.start,
            end=piece.keys.end,
            keys_only="value" not in options.columns,
            page_bytes=options.page_bytes,
            patience_s=self._config.timeout_s,
        )
        for page in pages:
            batch = typed(batch_of(page, piece.split.partition, options.columns), options.types)
            if batch.num_rows:
                yield batch
