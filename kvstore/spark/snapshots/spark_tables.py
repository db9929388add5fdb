"""Tables of records as Spark's data frames: of any size, on all machines of the Spark cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F

from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.fold import folded, rows_read_by
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.runners import failure_of
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.tables import Differences, Read, Work

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class SparkTables:
    """Tables that a Spark session computes as data frames."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def folded(
        self, store: SnapshotStore, chain: Sequence[Manifest], cut: Cut, later: Sequence[Read] = ()
    ) -> DataFrame:
        return folded(self._session, store, chain, cut, self.read(later) if later else None)

    def read(self, parts: Sequence[Read]) -> DataFrame:
        return rows_read_by(self._session, len(parts), lambda number: parts[number]())

    def living(self, table: DataFrame, horizon_ms: int) -> DataFrame:
        return table.where(f"expires_at IS NULL OR unix_millis(expires_at) > {horizon_ms}")

    def differences(self, old: DataFrame, new: DataFrame, columns: Sequence[str], examples: int) -> Differences:
        both = _side(old, columns, "old").join(_side(new, columns, "new"), "key", "full_outer")
        kind = (
            F.when(F.col("old").isNull(), "added")
            .when(F.col("new").isNull(), "removed")
            .when(F.col("old") == F.col("new"), "same")
            .otherwise("changed")
        )
        classified = both.withColumn("kind", F.when(_is_same(columns), "same").otherwise(kind))
        try:
            counted = {
                row["kind"]: row
                for row in classified.groupBy("kind")
                .agg(F.count("*").alias("rows"), F.sum("old_bytes").alias("old"), F.sum("new_bytes").alias("new"))
                .collect()
            }
            shown: list[Any] = []
            if examples and counted.keys() - {"same"}:
                shown = classified.where("kind <> 'same'").select("key", "kind").limit(examples).collect()
        except Exception as error:  # any error of Spark or its JVM
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

    def work_through(
        self, table: DataFrame, columns: Sequence[str], work: Work, counts: Sequence[str]
    ) -> dict[str, int]:
        def run(batches: Iterator[Any]) -> Iterator[Any]:
            found = work(batches)
            yield pa.RecordBatch.from_pydict({name: [found[name]] for name in counts})

        schema = ", ".join(f"{name} long" for name in counts)
        try:
            rows = table.select(*columns).mapInArrow(run, schema).collect()
        except Exception as error:  # any error of Spark or its JVM
            raise failure_of(error) from error
        return {name: sum(row[name] for row in rows) for name in counts}


def _side(table: DataFrame, columns: Sequence[str], name: str) -> DataFrame:
    """Return keys with columns, with values replaced by checksums, so that values need not be shuffled."""
    wanted = [F.sha2("value", 256).alias("value") if each == "value" else F.col(each) for each in columns]
    size = F.length("key") + F.length("value")
    return table.select("key", F.struct(*wanted).alias(name), size.cast("long").alias(f"{name}_bytes"))


def _is_same(columns: Sequence[str]) -> Column:
    found = F.col("old").isNotNull() & F.col("new").isNotNull()
    for each in columns:
        found = found & F.col(f"old.{each}").eqNullSafe(F.col(f"new.{each}"))
    return found
