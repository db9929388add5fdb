"""A snapshot as a Delta table: one row for each key, one version of the table for each snapshot of the chain.

Without Spark. A commit says of which snapshot it is (`kvstore.snapshot`). So the next one merges only what came since,
and one that was killed goes on behind its last commit; a table of something else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.client.pinned.arrow import SCHEMA
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.table import read_table
from kvstore.spark.snapshots.verify import parquet_paths

SNAPSHOT = "kvstore.snapshot"
MERGE_ROWS = 100_000
"""Changes that are held in memory at a time."""


def export(
    store: SnapshotStore, chain: Sequence[Manifest], table: str, done: Callable[[int], None] = lambda rows: None
) -> list[str]:
    """Bring the table at this path or URL to the end of the chain; the snapshots that were added. Raises ConfigError
    without deltalake, InvalidRequest for a table that is not of this chain, Corrupted."""
    try:
        import deltalake
    except ImportError:
        raise ConfigError("deltalake is not installed: install kvstore-log[delta]") from None
    known = _snapshots_of(deltalake, table)
    names = [each.id for each in chain]
    if known and known[-1] not in names:
        raise InvalidRequest(
            f"the table at {table} is at snapshot {known[-1]}, which {names[-1]} does not stand on: give another place"
        )
    missing = chain[names.index(known[-1]) + 1 :] if known else chain
    for manifest in missing:
        if manifest.parent is None:
            _write(deltalake, store, manifest, table, done)
        else:
            _merge(deltalake, store, manifest, table, done)
    return [each.id for each in missing]


def _snapshots_of(deltalake: Any, table: str) -> list[str]:
    """Those that the table has, oldest first. Raises InvalidRequest for a table that somebody else has made."""
    if not deltalake.DeltaTable.is_deltatable(table):
        return []
    commits = [each.get(SNAPSHOT) for each in reversed(deltalake.DeltaTable(table).history())]
    if not all(commits):
        raise InvalidRequest(f"the table at {table} has versions that are no snapshot's: give another place")
    return commits


def _write(deltalake: Any, store: SnapshotStore, manifest: Manifest, table: str, done: Callable[[int], None]) -> None:
    rows = pa.RecordBatchReader.from_batches(SCHEMA, _batches(store, manifest, done))
    deltalake.write_deltalake(table, rows, mode="error", commit_properties=_said(deltalake, manifest.id))


def _merge(deltalake: Any, store: SnapshotStore, manifest: Manifest, table: str, done: Callable[[int], None]) -> None:
    """In one commit, so that a table is never between two snapshots: so the changes of a snapshot are gathered first,
    of each key the last."""
    last = SCHEMA.empty_table()
    waiting: list[pa.RecordBatch] = []
    for batch in _batches(store, manifest, done):
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= MERGE_ROWS:
            last, waiting = _newest(pa.concat_tables([last, pa.Table.from_batches(waiting)])), []
    last = _newest(pa.concat_tables([last, pa.Table.from_batches(waiting, SCHEMA)]))
    (
        deltalake.DeltaTable(table)
        .merge(
            source=last,
            predicate="old.key = new.key",
            source_alias="new",
            target_alias="old",
            commit_properties=_said(deltalake, manifest.id),
        )
        .when_matched_delete(predicate="new.value IS NULL")
        .when_matched_update_all()
        .when_not_matched_insert_all(predicate="new.value IS NOT NULL")
        .execute()
    )


def _said(deltalake: Any, snapshot: str) -> Any:
    return deltalake.CommitProperties(custom_metadata={SNAPSHOT: snapshot})


def _batches(store: SnapshotStore, manifest: Manifest, done: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for path in parquet_paths(store, manifest):
        for batch in read_table(path):
            yield batch
            done(batch.num_rows)


def _newest(rows: pa.Table) -> pa.Table:
    """Of each key the row with the largest version, in whatever partition."""
    if not rows.num_rows:
        return rows
    order = pc.sort_indices(rows, [("key", "ascending"), ("version", "descending")])
    ordered = rows.take(order)
    keys = ordered["key"].combine_chunks()
    first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return ordered.filter(pa.concat_arrays([pa.array([True]), first]))
