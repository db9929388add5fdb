"""Reads the change feed of one partition page by page and converts pages to Arrow record batches. Streams and
incremental snapshots use this module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import SCHEMA as PINNED
from kvstore.client.pinned.arrow import times_of
from kvstore.env.clock import SystemClock
from kvstore.errors import Unavailable
from kvstore.proto import feed_pb2

KINDS: dict[int, str] = {
    feed_pb2.CREATED: "created",
    feed_pb2.OVERWRITTEN: "overwritten",
    feed_pb2.DELETED: "deleted",
    feed_pb2.EXPIRED: "expired",
}
GONE = (feed_pb2.DELETED, feed_pb2.EXPIRED)
SCHEMA = PINNED.append(pa.field("kind", pa.string(), nullable=False))


WAIT_MS = 2_000
"""Milliseconds for which a server may wait for changes that its replica has not applied yet."""


def pages_between(
    feed: FeedReader,
    partition: str,
    after: int,
    until: int,
    *,
    servers: tuple[str, ...] = (),
    patience_s: float,
    start: bytes = b"",
    end: bytes = b"",
    keys_only: bool = False,
) -> Iterator[feed_pb2.ChangesResponse]:
    """Yield the changes of a partition with sequences in (`after`, `until`] and keys in [`start`, `end`), page by page,
    in log order. An empty `end` means no upper bound. Pages without matching changes are skipped.

    `servers` are the servers to ask, best first. Raises PositionTrimmed if the log no longer has the changes after
    `after`, and Unavailable if no server makes progress for `patience_s` seconds.
    """
    clock = SystemClock()
    progress_at = clock.now()
    while after < until:
        page = feed.changes(
            partition,
            after,
            until=until,
            servers=servers,
            wait_ms=WAIT_MS,
            start=start,
            end=end,
            keys_only=keys_only,
            timeout_s=patience_s,
        )
        if page.next > after:
            progress_at = clock.now()
        elif clock.now() - progress_at > patience_s:
            raise Unavailable(f"partition {partition}: no server returned its log from {after} to {until}")
        after = page.next
        if page.keys:
            yield page


def batch_of(page: feed_pb2.ChangesResponse, partition: str, columns: Sequence[str]) -> Any:
    """Return the changes of a page as a pyarrow.RecordBatch with the named columns of SCHEMA. Raises ValueError for
    an unknown column."""
    arrays = [_column(page, name, partition) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([SCHEMA.field(name) for name in columns]))


def _column(page: feed_pb2.ChangesResponse, name: str, partition: str) -> Any:
    match name:
        case "partition":
            return pa.repeat(pa.scalar(partition), len(page.keys))
        case "key":
            return pa.array(page.keys, pa.binary())
        case "value":
            return pa.array(page.values, pa.binary(), mask=np.isin(_kinds(page), GONE))
        case "version":
            return pa.array(page.sequences, pa.int64())
        case "created_version":
            return pa.array(page.created, pa.int64())
        case "written_at":
            return times_of(_numbers(page.times_ms))
        case "expires_at":
            return times_of(_numbers(page.expires_ms))
        case "kind":
            return pa.array([KINDS[each] for each in page.kinds], pa.string())
    raise ValueError(f"unknown column {name!r}; expected one or more of {', '.join(SCHEMA.names)}")


def _kinds(page: feed_pb2.ChangesResponse) -> Any:
    return np.frombuffer(page.kinds, np.uint8)


def _numbers(found: Sequence[int]) -> Any:
    return np.fromiter(found, np.int64, len(found))
