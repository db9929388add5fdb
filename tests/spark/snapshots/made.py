"""Snapshots made by hand from a store that is a list of changes: the input of tests of files, chains and checks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.ring.hashing import MURMUR3
from kvstore.spark.snapshots import manifest as manifests
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.manifest import DataFile, Manifest, PartitionPosition, SnapshotKind
from kvstore.spark.snapshots.table import TableWriter, columns_of

HALF = 1 << 31
RANGES = {"p1": ((0, HALF - 1),), "p2": ((HALF, 2 * HALF - 1),)}
EPOCH_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Change:
    """One entry of a partition's log."""

    key: bytes
    value: bytes | None
    sequence: int
    time_ms: int
    expires_ms: int = 0

    @property
    def partition(self) -> str:
        return "p1" if MURMUR3.token_of(self.key) < HALF else "p2"


def file_of(folder: Path, partition: str, changes: Sequence[Change], part: str = "00000") -> DataFile:
    """Write a file in the folder of a snapshot."""
    (folder / manifests.DATA).mkdir(parents=True, exist_ok=True)
    name = f"{manifests.DATA}/{partition}-{part}.parquet"
    writer = TableWriter(folder / name, partition)
    for at in range(0, len(changes), 100):
        some = changes[at : at + 100]
        columns = zip(*((c.key, c.value, c.sequence, c.sequence, c.time_ms, c.expires_ms) for c in some), strict=True)
        writer.write(columns_of(partition, *map(list, columns)))
    return writer.close(name)


def places_of(log: Sequence[Change]) -> tuple[PartitionPosition, ...]:
    """Return the end of each partition's log, at a MARK after all of it."""
    time_ms = 1 + max((change.time_ms for change in log), default=EPOCH_MS)
    found = []
    for partition, ranges in RANGES.items():
        own = [change for change in log if change.partition == partition]
        found.append(
            PartitionPosition(
                partition=partition,
                ledger=1,
                entry=len(own),
                sequence=max((change.sequence for change in own), default=0),
                time_ms=time_ms,
                ranges=ranges,
            )
        )
    return tuple(found)


def manifest_of(
    name: str,
    parent: Manifest | None,
    places: tuple[PartitionPosition, ...],
    files: Sequence[DataFile] = (),
    *,
    hour: int = 0,
) -> Manifest:
    started_ms = EPOCH_MS + hour * HOUR_MS
    return Manifest(
        id=name,
        kind=SnapshotKind.INCREMENTAL if parent else SnapshotKind.FULL,
        parent=parent.id if parent else None,
        cluster="cluster-1",
        started_ms=started_ms,
        ended_ms=started_ms + 1000,
        ring_version=7,
        rows=sum(file.rows for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        partitions=places,
        files=tuple(sorted(files, key=lambda file: file.path)),
        hash=MURMUR3.name,
    )


def full(store: DirectoryStore, name: str, log: Sequence[Change], *, hour: int = 0) -> Manifest:
    """Publish a full snapshot of the log."""
    last = {change.key: change for change in log}
    kept = sorted((c for c in last.values() if c.value is not None), key=lambda c: (MURMUR3.token_of(c.key), c.key))
    return _published(store, manifest_of(name, None, places_of(log), hour=hour), kept)


def incremental(
    store: DirectoryStore, name: str, parent: Manifest, log: Sequence[Change], *, hour: int = 1
) -> Manifest:
    """Publish an incremental of the log entries after the parent."""
    before = parent.places()
    new = [change for change in log if change.sequence > before[change.partition].sequence]
    return _published(store, manifest_of(name, parent, places_of(log), hour=hour), new)


def _published(store: DirectoryStore, manifest: Manifest, rows: Sequence[Change]) -> Manifest:
    ready = store.root / f".work-{manifest.id}"
    ready.mkdir(parents=True)
    files = [
        file_of(ready, partition, own)
        for partition in RANGES
        if (own := [change for change in rows if change.partition == partition])
    ]
    whole = replace(
        manifest,
        files=tuple(files),
        rows=sum(file.rows for file in files),
        size_bytes=sum(file.size_bytes for file in files),
    )
    store.publish_folder(whole, ready)
    shutil.rmtree(ready, ignore_errors=True)
    return whole


def some_log(count: int, *, keys: int = 50, start: int = 0) -> list[Change]:
    """Puts and deletes of a few keys, one per second."""
    found = []
    for number in range(start, start + count):
        key = b"key-%d" % (number * 7919 % keys)
        value = None if number % 5 == 4 else b"value-%d" % number
        found.append(Change(key, value, number + 1, EPOCH_MS + number * 1000))
    return found
