"""Exports snapshots to a Delta table, with one row per key and one table version per snapshot. Does not use Spark.

Each commit to the table names its snapshot, so the next call merges only the changes since that snapshot. If the chain
starts with a newer full snapshot, the call overwrites the table with that snapshot. A call after a killed one continues
after the last commit. A table with other content is refused. Maintenance by users (OPTIMIZE, VACUUM) changes no rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.client.pinned.arrow import SCHEMA
from kvstore.errors import ConfigError, InvalidRequest, Unavailable
from kvstore.extras import install_hint
from kvstore.spark.columns import AS_BYTES, typed
from kvstore.spark.options import Types
from kvstore.spark.snapshots.chains import complete_until_ms
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.table import read_table
from kvstore.spark.snapshots.usable import stored_files

SNAPSHOT, CLUSTER, UNTIL = "kvstore.snapshot", "kvstore.cluster", "kvstore.complete_until_ms"
"""Keys of the commit metadata that identifies the snapshot: its id, its cluster, and the time up to which it is
complete."""
KEEPS_ROWS = ("OPTIMIZE", "VACUUM START", "VACUUM END")
MERGE_ROWS = 100_000
"""Number of changes that are gathered in memory before they are reduced to the last change of each key."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class TableState:
    """The snapshot that a Delta table contains."""

    snapshot: str
    cluster: str
    until_ms: int


def export(
    store: SnapshotStore,
    chain: Sequence[Manifest],
    table: str,
    done: Callable[[int], None] = lambda rows: None,
    types: Types = AS_BYTES,
) -> list[str]:
    """Update the Delta table at this path or URL to the end of the chain, and return the ids of the snapshots that were
    added.

    Calls `done` with the number of rows as they are processed. `types` are the types of the columns `key` and `value`,
    which must stay the same for a table. Raises ConfigError if deltalake is not installed, InvalidRequest if the table
    has other content or a later snapshot, or a row does not match `types`, Unavailable, Corrupted.
    """
    try:
        import deltalake
        from deltalake.exceptions import DeltaError
    except ImportError:
        raise ConfigError(f"deltalake is not installed: {install_hint('node', 'delta')}") from None
    added: list[str] = []
    with _one_line_errors(table, DeltaError):
        while True:
            # A commit to the version whose state was checked fails if another call has committed meanwhile.
            opened = deltalake.DeltaTable(table) if deltalake.DeltaTable.is_deltatable(table) else None
            missing = _missing(chain, None if opened is None else _state_of(opened, table), table)
            if not missing:
                break
            if missing[0].parent is None:
                _write(deltalake, store, missing[0], opened or table, done, types)
            else:
                _merge(deltalake, store, missing[0], opened, done, types)
            added.append(missing[0].id)
    return added


@contextmanager
def _one_line_errors(table: str, kind: type[Exception]) -> Iterator[None]:
    """Replace the multi-line errors of Delta's library by errors of one line."""
    try:
        yield
    except (kind, OSError) as error:
        lines = [" ".join(line.split()) for line in _COLOUR.sub("", str(error)).splitlines()]
        what = next((line for line in lines if line), type(error).__name__)
        raise Unavailable(f"the table at {table} could not be read or written: {what}") from error


def _state_of(opened: Any, table: str) -> TableState:
    """Return the snapshot that the table contains. Raises InvalidRequest if someone else has created the table or
    written to it."""
    commits = [each for each in opened.history() if each.get("operation") not in KEEPS_ROWS]
    if not commits or not all(each.get(SNAPSHOT) and each.get(CLUSTER) and each.get(UNTIL) for each in commits):
        raise InvalidRequest(f"the table at {table} has versions that are not snapshots; choose another path")
    last = commits[0]
    return TableState(last[SNAPSHOT], last[CLUSTER], int(last[UNTIL]))


def _missing(chain: Sequence[Manifest], at: TableState | None, table: str) -> Sequence[Manifest]:
    """Return the snapshots of the chain that the table lacks, in order."""
    if at is None:
        return chain
    names = [each.id for each in chain]
    if at.snapshot in names:
        return chain[names.index(at.snapshot) + 1 :]
    if at.cluster != chain[-1].cluster:
        raise InvalidRequest(
            f"the table at {table} has snapshot {at.snapshot} of cluster {at.cluster}, but {names[-1]} belongs to "
            f"{chain[-1].cluster}; choose another path"
        )
    if complete_until_ms(chain[-1]) < at.until_ms:
        raise InvalidRequest(
            f"the table at {table} has snapshot {at.snapshot}, which is later than {names[-1]}; read earlier versions "
            "with Delta's time travel"
        )
    return chain


def _write(
    deltalake: Any,
    store: SnapshotStore,
    manifest: Manifest,
    table: Any,
    done: Callable[[int], None],
    types: Types,
) -> None:
    """Write a full snapshot to a new table, whose place `table` is, or over all rows of an opened table."""
    mode = "error" if isinstance(table, str) else "overwrite"
    rows = pa.RecordBatchReader.from_batches(_schema(types), _batches(store, manifest, done, types))
    deltalake.write_deltalake(table, rows, mode=mode, commit_properties=_commit_properties(deltalake, manifest))


def _merge(
    deltalake: Any, store: SnapshotStore, manifest: Manifest, opened: Any, done: Callable[[int], None], types: Types
) -> None:
    """Merge an incremental snapshot in one commit, so that the table is never between two snapshots. To make that
    possible, first gather the last change of each key in memory."""
    schema = _schema(types)
    last = schema.empty_table()
    waiting: list[pa.RecordBatch] = []
    for batch in _batches(store, manifest, done, types):
        waiting.append(batch)
        if sum(each.num_rows for each in waiting) >= MERGE_ROWS:
            last, waiting = _newest(pa.concat_tables([last, pa.Table.from_batches(waiting)])), []
    last = _newest(pa.concat_tables([last, pa.Table.from_batches(waiting, schema)]))
    (
        opened.merge(
            source=last,
            predicate="old.key = new.key",
            source_alias="new",
            target_alias="old",
            commit_properties=_commit_properties(deltalake, manifest),
        )
        .when_matched_delete(predicate="new.value IS NULL")
        .when_matched_update_all()
        .when_not_matched_insert_all(predicate="new.value IS NOT NULL")
        .execute()
    )


def _commit_properties(deltalake: Any, manifest: Manifest) -> Any:
    metadata = {SNAPSHOT: manifest.id, CLUSTER: manifest.cluster, UNTIL: str(complete_until_ms(manifest))}
    return deltalake.CommitProperties(custom_metadata=metadata)


def _schema(types: Types) -> pa.Schema:
    """Return the schema of a table with these types of keys and values."""
    return typed(pa.RecordBatch.from_pylist([], SCHEMA), types).schema


def _batches(
    store: SnapshotStore, manifest: Manifest, done: Callable[[int], None], types: Types
) -> Iterator[pa.RecordBatch]:
    for stored in stored_files(store, manifest):
        for batch in read_table(stored):
            yield typed(batch, types)
            done(batch.num_rows)


def _newest(rows: pa.Table) -> pa.Table:
    """Return the row with the highest version of each key, over all partitions."""
    if not rows.num_rows:
        return rows
    order = pc.sort_indices(rows, [("key", "ascending"), ("version", "descending")])
    ordered = rows.take(order)
    keys = ordered["key"].combine_chunks()
    first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return ordered.filter(pa.concat_arrays([pa.array([True]), first]))
