"""Reduces a chain of snapshots to one table with the last row of each key, at the end of the chain or at a cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from kvstore.spark import columns
from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.table import read_table
from kvstore.spark.snapshots.usable import stored_files

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

NAMES = tuple(columns.COLUMNS)
SCHEMA = columns.schema_of(NAMES)
"""The schema of a snapshot's files, which is the schema of a read."""
KEPT = ("version", "value", "created_version", "written_at", "expires_at", "partition")
"""Columns of a row besides its key. The version comes first, because rows of a key are compared by version, even
across partitions."""


def folded(
    session: SparkSession,
    store: SnapshotStore,
    chain: Sequence[Manifest],
    cut: Cut,
    later: DataFrame | None = None,
) -> DataFrame:
    """Return the records of the chain at the cut as a data frame. `later` are changes after the chain. Raises
    Corrupted if files are missing."""
    tables = [_table(session, store, manifest) for manifest in chain]
    tables[1:] = [table.where(_within(cut)) for table in tables[1:]]
    if later is not None:
        tables.append(later)
    if len(tables) == 1:
        found = tables[0]
    else:
        every = reduce(lambda one, other: one.unionByName(other), tables)
        last = every.groupBy("key").agg(F.max(F.struct(*KEPT)).alias("row"))
        found = last.select("key", "row.*").where("value IS NOT NULL")
    if cut.time_ms is not None:
        found = found.where(F.col("expires_at").isNull() | (F.col("expires_at") > _moment(cut.time_ms)))
    return found.select(*NAMES)


def _table(session: SparkSession, store: SnapshotStore, manifest: Manifest) -> DataFrame:
    """Return the rows of one snapshot. Tasks read its files with `read_table`: Spark's own reader follows symbolic
    links and does not limit sizes, and its Hadoop libraries need jars and settings for URLs."""
    found = stored_files(store, manifest)
    return rows_read_by(session, len(found), lambda number: read_table(found[number]))


def rows_read_by(session: SparkSession, count: int, read: Callable[[int], Iterator[Any]]) -> DataFrame:
    """Return a data frame of the rows that `count` tasks read. Each task calls `read` with its number, from 0."""
    if count == 0:
        return session.createDataFrame([], SCHEMA)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                yield from read(number)

    return session.range(0, count, 1, count).mapInArrow(run, SCHEMA)


def _within(cut: Cut) -> Column:
    """Return the condition that selects the rows of an incremental snapshot before the cut."""
    within = F.lit(True)
    if cut.time_ms is not None:
        within = within & (F.col("written_at") <= _moment(cut.time_ms))
    for partition, sequence in sorted((cut.sequences or {}).items()):
        within = within & ((F.col("partition") != partition) | (F.col("version") <= sequence))
    return within


def _moment(time_ms: int) -> Column:
    return F.lit(datetime.fromtimestamp(time_ms / 1000, UTC))
