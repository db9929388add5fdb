"""Operations on tables of records, for restores and comparisons. Spark runs them at any size (spark_tables.py). For
small tables, this process runs them (local_tables.py), because starting a JVM would take longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore

CONTENT = ("value", "expires_at")
"""Columns that a restored record has in common with the original."""
EXACT = (*CONTENT, "version", "created_version", "written_at")

Read = Callable[[], Iterator[Any]]
"""A function that reads a part of a table and yields record batches with all columns. It may be called again, and in
another process."""
Work = Callable[[Iterator[Any]], dict[str, int]]
"""A function that processes a part of a table and returns counts by name."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The differences between two tables, called old and new."""

    same: int
    added: int
    """Number of keys that only the new table has."""
    removed: int
    changed: int
    old_bytes: int
    """Bytes of the keys and values of the old table."""
    new_bytes: int
    examples: tuple[tuple[bytes, str], ...]
    """Some of the differing keys, each with `added`, `removed` or `changed`."""

    @property
    def count(self) -> int:
        return self.added + self.removed + self.changed


class Tables(Protocol[T]):
    """Makes, compares and processes tables of records. All methods raise StoreError."""

    def folded(self, store: SnapshotStore, chain: Sequence[Manifest], cut: Cut, later: Sequence[Read] = ()) -> T:
        """Return the last record of each key at the cut. `later` are changes after the chain. Raises Corrupted if
        files are missing."""

    def read(self, parts: Sequence[Read]) -> T:
        """Return a table of these rows."""

    def living(self, table: T, horizon_ms: int) -> T:
        """Return the table without records that have expired at `horizon_ms`, in milliseconds since 1970."""

    def differences(self, old: T, new: T, columns: Sequence[str], examples: int) -> Differences:
        """Compare two tables key by key, in the named columns. Returns at most `examples` differing keys."""

    def work_through(self, table: T, columns: Sequence[str], work: Work, counts: Sequence[str]) -> dict[str, int]:
        """Process all rows with `work`, part by part. Returns the sum of each of the named counts."""
