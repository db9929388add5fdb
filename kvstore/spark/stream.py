"""The streaming source, which reads the change feed. It returns each change once and in log order, even if leaders or
the ring change.

Offsets are positions in the logs, so a micro-batch has the same rows every time it is read. While a query runs, and for
some time afterwards, the servers do not trim the logs after the query's position.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader, PartitionFeed
from kvstore.env.clock import SystemClock
from kvstore.errors import PositionTrimmed, StoreError
from kvstore.spark import offsets
from kvstore.spark.columns import typed
from kvstore.spark.offsets import ChangeSpan, Offset
from kvstore.spark.options import StreamOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch

logger = logging.getLogger(__name__)
TASK_ROWS = 200_000
"""Maximum number of sequences that one task reads."""
SMALL_ROWS = 10_000
"""Partitions with fewer changes than this in total share one task, because another task would cost more than it
saves."""
PROBE_BYTES = 1 << 20
WAIT_MS = 2_000
"""Milliseconds for which a server may wait for changes that its replica has not applied yet."""
READ_AGAIN = (
    "Read the store once (spark.read), then start a new query with another checkpointLocation; the option holdTtl sets "
    "how long logs are retained for a query that is down"
)
HOLD_SHARES = 4
"""Number of times that a hold is renewed within its lifetime, and that a failed renewal is retried within the
interval of renewals."""


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader of `spark.readStream.format("kvstore")`. On the driver, one instance exists as long as the
    query. Tasks receive pickled copies without connections."""

    def __init__(self, config: ClientConfig, options: StreamOptions) -> None:
        self._config, self._options = config, options
        self._target: Offset | None = None
        """The positions at which a query with Trigger.AvailableNow ends; None for other queries."""
        self._hold = options.hold or f"spark-{uuid4().hex[:16]}"
        """The name of the hold: the user's, or a generated name that the query's offsets contain. If each run
        generated a new name, each would add another hold, and the number of holds is limited."""
        self._batch_start: Offset = {}
        self._held_at = -1e9
        self._feed: FeedReader | None = None
        self._known: list[PartitionFeed] = []
        """The most recently read positions of all partitions."""
        self._identity = ""
        """The id of the cluster that the positions belong to."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the tasks of each micro-batch, without open connections."""
        return self.__dict__ | {"_feed": None, "_known": []}

    # ── on the driver ──

    def _positions(self, timeout_s: float | None = None) -> list[PartitionFeed]:
        self._known = self._reader().positions(timeout_s=timeout_s)
        self._identity = self._identity or (self._known[0].cluster if self._known else "")
        return self._known

    def _reader(self) -> FeedReader:
        """Return the query's connection, and open it on first use. It is reused because opening one takes as long as
        a request."""
        self._feed = self._feed or FeedReader(self._config)
        return self._feed

    def stop(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()

    def initialOffset(self) -> Offset:
        feeds = self._positions()
        if self._options.start == "earliest":
            return self._named(offsets.oldest(feeds))
        if self._options.start == "latest":
            return self._named(offsets.latest(feeds))
        given: Offset = dict(self._options.start)  # type: ignore[arg-type]
        offsets.check_given(given, feeds)
        return self._named(given)

    def _named(self, offset: Offset) -> Offset:
        """Return the offset with the name of this query's hold. An offset that a user has copied from another query
        may contain the other query's name."""
        return offset if self._options.hold else offset | {offsets.HOLD: self._hold}

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max:
            return ReadMaxRows(self._options.rows_max)
        return ReadMaxBytes(self._options.bytes_max) if self._options.bytes_max else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        feeds = self._positions()
        with _explained():
            offsets.check_readable(start, feeds)
        if not self._options.hold:
            self._hold = offsets.hold_of(start) or self._hold
        self._keep_hold(self._reader(), start)
        ends = self._reachable(feeds)
        waiting = [each for each in feeds if ends[each.partition] > offsets.sequence_of(start, each.partition)]
        if waiting and not isinstance(limit, ReadAllAvailable):
            ends |= _limited(self._reader(), start, waiting, ends, limit, self._options)
        return self._named(offsets.advanced(start, ends, [each for each in feeds if each.partition in ends]))

    def reportLatestOffset(self) -> Offset | None:
        try:
            return offsets.latest(self._positions(timeout_s=2.0))
        except StoreError:
            return None

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {each.partition: each.latest for each in self._positions()}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        feeds = self._known or self._positions()
        with _explained():
            offsets.check_batch(start, end, feeds)
        servers = {each.partition: each.servers for each in feeds}
        spans = [
            replace(each, servers=servers.get(each.partition, ())) for each in offsets.spans(start, end, TASK_ROWS)
        ]
        return [InputPartition(task) for task in offsets.tasks(spans, SMALL_ROWS)]

    def _reachable(self, feeds: Sequence[PartitionFeed]) -> dict[str, int]:
        """Return the position up to which each partition may be read now. With Trigger.AvailableNow, partitions that
        joined after the start of the run are read in the next run."""
        if self._target is None:
            return {each.partition: each.latest for each in feeds}
        return {each.partition: min(each.latest, self._target.get(each.partition, 0)) for each in feeds}

    def _keep_hold(self, feed: FeedReader, start: Offset) -> None:
        """Retain the logs from the start of the previous batch, because a query that dies reads that batch again. A
        failure is logged and retried at a later batch."""
        before, self._batch_start = self._batch_start or start, dict(start)
        now = SystemClock().now()
        renewed_s = self._options.hold_s / HOLD_SHARES
        if now - self._held_at < renewed_s:
            return
        held = offsets.lowest(before, start)
        wanted = {each: offsets.sequence_of(held, each) for each in held if not offsets.has_ended(held, each)}
        try:
            feed.hold(self._hold, wanted, self._options.hold_s)
            self._held_at = now
        except StoreError as error:
            self._held_at = now - renewed_s * (1 - 1 / HOLD_SHARES)  # the batch has already been delayed
            logger.warning("logs not retained name=%s why=%s", self._hold, error)

    # ── in tasks ──

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        task: tuple[ChangeSpan, ...] | None = partition.value
        if task is None:
            return
        with FeedReader(self._config, self._identity) as feed:
            for span in task:
                yield from self._changes(feed, span)

    def _changes(self, feed: FeedReader, span: ChangeSpan) -> Iterator[RecordBatch]:
        # Import gRPC only after the fork that created this process.
        from kvstore.spark.changes import batch_of, pages_between

        options = self._options
        if options.keys.is_empty:  # as for batch reads; a server refuses such bounds
            return
        for page in pages_between(
            feed,
            span.partition,
            span.after,
            span.until,
            servers=span.servers,
            patience_s=self._config.timeout_s,
            start=options.keys.start,
            end=options.keys.end,
            keys_only="value" not in options.columns,
        ):
            yield typed(batch_of(page, span.partition, options.columns), options.types)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except PositionTrimmed as error:
        raise PositionTrimmed(error.partition, error.asked, error.oldest, READ_AGAIN) from None


def _limited(
    feed: FeedReader,
    start: Offset,
    waiting: Sequence[PartitionFeed],
    ends: Mapping[str, int],
    limit: ReadLimit,
    options: StreamOptions,
) -> dict[str, int]:
    """Return the position at which each partition's part of the micro-batch ends, so that the batch has about the
    limit's size. Sequences rise by one per change but may jump, so this function looks up the next change of each
    partition."""
    amount = limit.max_rows if isinstance(limit, ReadMaxRows) else getattr(limit, "max_bytes", options.bytes_max)
    is_bytes = not isinstance(limit, ReadMaxRows)
    share = offsets.shares(amount or PROBE_BYTES, [each.partition for each in waiting])
    found = {}
    for each in waiting:
        after = offsets.sequence_of(start, each.partition)
        rows = _rows_of(feed, each, after, share[each.partition]) if is_bytes else share[each.partition]
        end = ends[each.partition]
        first = feed.changes(
            each.partition, after, until=end, rows_max=1, keys_only=True, servers=each.servers, wait_ms=WAIT_MS
        )
        until = first.sequences[0] - 1 + rows if first.sequences else first.next
        # Advance by at least one, even if a replica is behind: AvailableNow ends when nothing is left to do.
        found[each.partition] = min(end, max(after + 1, until))
    return found


def _rows_of(feed: FeedReader, each: PartitionFeed, after: int, share: int) -> int:
    """Estimate how many rows fit into `share` bytes, from the size of the partition's next rows."""
    page = feed.changes(each.partition, after, bytes_max=min(share, PROBE_BYTES), servers=each.servers)
    size = sum(map(len, page.keys)) + sum(map(len, page.values))
    return max(1, len(page.keys) * share // size) if size else 1
