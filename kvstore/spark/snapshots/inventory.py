"""Lists what a store of snapshots really contains: which snapshots are usable, and which are under a legal hold. Reads
manifests and the sizes of files, not their content. Needs no pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import StoreError
from kvstore.spark.snapshots.chains import complete_until_ms, in_order
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.usable import usable_chain

USABLE = "usable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One snapshot of an inventory."""

    id: str
    manifest: Manifest | None
    """None if it cannot be read."""
    state: str
    """USABLE, or the reason why the snapshot cannot be restored."""
    legal_hold: str | None
    """The reason of its legal hold, if there is one."""

    @property
    def is_usable(self) -> bool:
        return self.state == USABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The snapshots of a store, oldest first, then those whose manifest cannot be read."""

    snapshots: Sequence[Listed]
    unfinished: Sequence[str]
    """Names of folders of jobs that run or were killed."""

    @property
    def newest(self) -> Manifest | None:
        """The newest usable snapshot, or None."""
        usable = [each.manifest for each in self.snapshots if each.is_usable and each.manifest is not None]
        return usable[-1] if usable else None

    @property
    def newest_by_cluster(self) -> dict[str, Manifest | None]:
        """The newest usable snapshot of each cluster that has a snapshot here; None if none of them is usable."""
        found: dict[str, Manifest | None] = {}
        for each in self.snapshots:
            if each.manifest is not None:
                found.setdefault(each.manifest.cluster, None)
                if each.is_usable:
                    found[each.manifest.cluster] = each.manifest
        return found

    @property
    def complete_until_ms(self) -> int | None:
        """The time in milliseconds since 1970 up to which the newest usable snapshot has all writes; None without
        one."""
        return None if self.newest is None else complete_until_ms(self.newest)


def inventory_of(store: SnapshotStore) -> Inventory:
    """Look at every snapshot of a store. Raises OSError or StoreError if the place cannot be read."""
    readable, problems = store.load_readable()
    holds = store.holds()
    rows: list[Listed] = []
    for manifest in in_order(readable):
        try:
            usable_chain(store, readable, manifest.id, problems)
            state = USABLE
        except StoreError as error:
            state = str(error)
        hold = holds.get(manifest.id)
        rows.append(
            Listed(id=manifest.id, manifest=manifest, state=state, legal_hold=None if hold is None else hold.reason)
        )
    lost = dict.fromkeys(holds.keys() - readable.keys(), "missing, although it is under a legal hold")
    for name, problem in sorted((lost | problems).items()):
        reason = holds[name].reason if name in holds else None
        rows.append(Listed(id=name, manifest=None, state=problem, legal_hold=reason))
    return Inventory(snapshots=rows, unfinished=[each.name for each in store.remains()])
