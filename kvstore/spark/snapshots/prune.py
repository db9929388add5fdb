"""Removes the snapshots of a store that a retention rule does not keep, and abandoned work. Needs no pyarrow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.spark.snapshots.chains import SnapshotRetention, kept, prunable
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.usable import usable_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """The outcome of a `prune`: what it removed, or would remove."""

    removed: Sequence[str]
    """Ids of snapshots."""
    remains: Sequence[str]
    """Names of folders that killed jobs had left."""
    busy: Sequence[str]
    """Ids of snapshots that stay for now: they are being restored, or a legal hold or another snapshot has come to
    need them meanwhile."""
    kept: Mapping[str, Sequence[str]]
    """The tags of each snapshot that stays, by id (`chains.kept`)."""


def prune(
    store: SnapshotStore,
    retention: SnapshotRetention,
    progress: Callable[[str, int, int | None], None],
    *,
    dry_run: bool = False,
) -> PruneResult:
    """Remove what the rule does not keep, children before parents. With `dry_run`, only report it.

    Raises StoreError and removes nothing if a manifest cannot be read, or if a snapshot that stays is incomplete: the
    snapshots to remove may then be the last complete ones. Raises OSError.
    """
    catalogue, held = store.load_all(), store.holds()
    tags = kept(catalogue, retention, held)
    going = prunable(catalogue, tags)
    for name in sorted(tags) if going else ():
        usable_chain(store, catalogue, name)
    remains = store.stale_remains(time.time())
    if dry_run:
        names = [each.id for each in going]
        return PruneResult(removed=names, remains=[each.name for each in remains], busy=(), kept=tags)
    removed: list[str] = []
    busy: list[str] = []
    for number, manifest in enumerate(going):
        progress("removing", number, len(going))
        (removed if store.remove(manifest.id) else busy).append(manifest.id)
    gone = store.remove_remains(remains)
    return PruneResult(removed=removed, remains=[each.name for each in gone], busy=busy, kept=tags)
