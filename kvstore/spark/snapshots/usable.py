"""Decides if a snapshot is usable, by its manifests and the presence and sizes of its files. Needs no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kvstore.spark.snapshots.chains import Catalogue, chain_of
from kvstore.spark.snapshots.manifest import Manifest
from kvstore.spark.snapshots.store import SnapshotStore
from kvstore.spark.snapshots.stored import StoredFile

CHECKS_AT_ONCE = 8
"""Number of files whose sizes are requested at a time. At a URL, each size costs a request."""


def stored_files(store: SnapshotStore, manifest: Manifest) -> list[StoredFile]:
    """Return the files of a snapshot. Raises Corrupted if one is missing, has another size or is not a regular file."""
    found = [StoredFile(store.folder(manifest.id) / file.path, file) for file in manifest.files]
    with ThreadPoolExecutor(CHECKS_AT_ONCE, "stored") as threads:
        list(threads.map(StoredFile.check, found))
    return found


def usable_chain(
    store: SnapshotStore, catalogue: Catalogue, wanted: str, unreadable: Mapping[str, str] | None = None
) -> list[Manifest]:
    """Return the chain of a snapshot, if the snapshot is usable: every file of the chain exists and has its size.

    Raises the errors of `chain_of` and `stored_files`. Does not read the files; `problems_of` does.
    """
    chain = chain_of(catalogue, wanted, unreadable)
    for manifest in chain:
        stored_files(store, manifest)
    return chain
