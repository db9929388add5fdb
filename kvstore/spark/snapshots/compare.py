"""Two tables of records against each other: a snapshot and the store it was taken of, one that was restored, or another
snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark.sql import functions as F

from kvstore.client.core.config import ClientConfig
from kvstore.client.feed import FeedReader
from kvstore.client.pinned.arrow import batch_of
from kvstore.client.pinned.pins import PinnedStore, Split, pin_store
from kvstore.client.pinned.read import read_pinned
from kvstore.errors import InvalidRequest, PositionTrimmed
from kvstore.spark.pins import kept_alive, release
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.fold import folded, rows_read_by
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.planning import SPLIT_BYTES, change_pieces, left_places, place_of
from kvstore.spark.snapshots.runners import failure_of
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.tasks import PAGE_BYTES, PATIENCE_S, changes
from kvstore.spark.snapshots.work import Piece

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

CONTENT = ("value", "expires_at")
"""What a restored record has in common with the original."""
EXACT = (*CONTENT, "version", "created_version", "written_at")
PIN_TTL_S = 300.0
"""It is renewed while we compare; a job that was killed leaves it for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Of two tables, called old and new."""

    same: int
    added: int
    """Keys only in the new one."""
    removed: int
    changed: int
    old_bytes: int
    """Keys and values."""
    new_bytes: int
    examples: tuple[tuple[bytes, str], ...]
    """Some of the keys, and whether each was added, removed or changed."""

    @property
    def count(self) -> int:
        return self.added + self.removed + self.changed


def differences(old: DataFrame, new: DataFrame, columns: Sequence[str], examples: int) -> Differences:
    """Key by key. Raises StoreError."""
    both = _side(old, columns, "old").join(_side(new, columns, "new"), "key", "full_outer")
    kind = (
        F.when(F.col("old").isNull(), "added")
        .when(F.col("new").isNull(), "removed")
        .when(F.col("old") == F.col("new"), "same")
        .otherwise("changed")
    )
    told = both.withColumn("kind", F.when(_is_same(columns), "same").otherwise(kind))
    try:
        counted = {
            row["kind"]: row
            for row in told.groupBy("kind")
            .agg(F.count("*").alias("rows"), F.sum("old_bytes").alias("old"), F.sum("new_bytes").alias("new"))
            .collect()
        }
        shown: list[Any] = []
        if examples and counted.keys() - {"same"}:
            shown = told.where("kind <> 'same'").select("key", "kind").limit(examples).collect()
    except Exception as error:  # whatever Spark and its JVM raise
        raise failure_of(error) from error

    def rows(kind: str) -> int:
        return int(counted[kind]["rows"]) if kind in counted else 0

    return Differences(
        same=rows("same"),
        added=rows("added"),
        removed=rows("removed"),
        changed=rows("changed"),
        old_bytes=sum(int(row["old"] or 0) for row in counted.values()),
        new_bytes=sum(int(row["new"] or 0) for row in counted.values()),
        examples=tuple(sorted((bytes(row["key"]), row["kind"]) for row in shown)),
    )


def _side(table: DataFrame, columns: Sequence[str], name: str) -> DataFrame:
    """Values by their checksum: they would all travel otherwise."""
    wanted = [F.sha2("value", 256).alias("value") if each == "value" else F.col(each) for each in columns]
    size = F.length("key") + F.length("value")
    return table.select("key", F.struct(*wanted).alias(name), size.cast("long").alias(f"{name}_bytes"))


def _is_same(columns: Sequence[str]) -> Column:
    found = F.col("old").isNotNull() & F.col("new").isNotNull()
    for each in columns:
        found = found & F.col(f"old.{each}").eqNullSafe(F.col(f"new.{each}"))
    return found


# ── against a cluster ──


def against_origin(
    session: SparkSession, store: SnapshotStore, chain: Sequence[Manifest], cluster: ClientConfig, examples: int
) -> Differences:
    """The store as it is now, against the snapshot and what the logs say has happened since. Raises InvalidRequest if
    the logs do not reach back so far."""
    last = chain[-1]
    with _pinned(cluster) as pinned:
        pieces = _pieces_since(last, pinned, cluster)
        later = (
            rows_read_by(session, len(pieces), lambda number: _changes_of(cluster, pieces[number])) if pieces else None
        )
        expected = folded(session, store, chain, Cut(), later)
        horizon_ms = max(each.time_ms for each in pinned.partitions)
        found = stored(session, pinned)
        return differences(_living(expected, horizon_ms), _living(found, horizon_ms), EXACT, examples)


def against_restored(
    session: SparkSession,
    store: SnapshotStore,
    chain: Sequence[Manifest],
    cut: Cut,
    cluster: ClientConfig,
    examples: int,
) -> Differences:
    """Another store as it is now, which should have the snapshot's keys, values and expiries, and nothing else."""
    with _pinned(cluster) as pinned:
        horizon_ms = max(each.time_ms for each in pinned.partitions)
        expected = folded(session, store, chain, cut)
        found = stored(session, pinned)
        return differences(_living(expected, horizon_ms), _living(found, horizon_ms), CONTENT, examples)


def _living(table: DataFrame, horizon_ms: int) -> DataFrame:
    """Without what has expired by then: a store may have forgotten it or not."""
    return table.where(f"expires_at IS NULL OR unix_millis(expires_at) > {horizon_ms}")


def stored(session: SparkSession, pinned: PinnedStore) -> DataFrame:
    """The records of a pinned store."""
    splits = pinned.splits()
    return rows_read_by(session, len(splits), lambda number: _records_of(splits[number]))


def _records_of(split: Split) -> Iterator[Any]:
    for page in read_pinned(split, page_bytes=PAGE_BYTES, patience_s=PATIENCE_S):
        yield batch_of(page, split.partition)


def _changes_of(cluster: ClientConfig, piece: Piece) -> Iterator[Any]:
    return changes(cluster, piece.partition, piece.first, piece.last, piece.servers)


def _pieces_since(last: Manifest, pinned: PinnedStore, cluster: ClientConfig) -> list[Piece]:
    """Return the changes since a snapshot. Raises InvalidRequest if the logs do not tell any more."""
    with FeedReader(cluster) as feed:
        feeds = {each.partition: each for each in feed.positions()}
    places = (*map(place_of, pinned.partitions), *left_places(last, pinned.partitions, feeds))
    pieces = list(change_pieces(last, places, feeds))
    for piece in pieces:
        oldest = feeds[piece.partition].oldest if piece.partition in feeds else 0
        if piece.first < oldest:
            trimmed = PositionTrimmed(piece.partition, piece.first, oldest)
            raise InvalidRequest(
                f"the log does not reach back to snapshot {last.id} ({trimmed}): it can be verified against itself only"
            )
    return pieces


@contextmanager
def _pinned(cluster: ClientConfig) -> Iterator[PinnedStore]:
    name = f"verify-{uuid4().hex[:12]}"
    try:
        pinned = pin_store(cluster, ttl_s=PIN_TTL_S, id=name, split_bytes=SPLIT_BYTES)
        with kept_alive(cluster, name, PIN_TTL_S, pinned_at=time.time()):
            yield pinned
    finally:  # also when it is interrupted while servers pin
        release(cluster, name)
