"""The work on tables of records that restores and comparisons need, and what comes of it. Spark does it for any size
(on_spark.py), this process for small ones, where a JVM would take longer to start (here.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvstore.spark.snapshots.chains import Cut
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore

CONTENT = ("value", "expires_at")
"""What a restored record has in common with the original."""
EXACT = (*CONTENT, "version", "created_version", "written_at")

Read = Callable[[], Iterator[Any]]
"""Reads a part of a table: record batches of all columns. It may be called again, and elsewhere."""
Work = Callable[[Iterator[Any]], dict[str, int]]
"""Goes through a part of a table; what it counted."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The differences of two tables, called old and new."""

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


class Tables(Protocol[T]):
    """Makes and compares tables. All raise StoreError."""

    def folded(self, store: SnapshotStore, chain: Sequence[Manifest], cut: Cut, later: Sequence[Read] = ()) -> T:
        """The records at the cut, of each key the last; `later` are changes behind the chain. Raises Corrupted for
        files that are not there."""

    def read(self, parts: Sequence[Read]) -> T:
        """All of these rows."""

    def living(self, table: T, horizon_ms: int) -> T:
        """Without what has expired by then."""

    def differences(self, old: T, new: T, columns: Sequence[str], examples: int) -> Differences:
        """Key by key, in these columns."""

    def work_through(self, table: T, columns: Sequence[str], work: Work, counts: Sequence[str]) -> dict[str, int]:
        """Have all rows worked through, part by part; the sums of what was counted under these names."""
