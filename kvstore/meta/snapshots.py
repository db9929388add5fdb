"""The cluster's records of its snapshots. Each record is a node under /snapshots, so that servers can report the age of
the last snapshot.

The snapshots themselves are stored elsewhere and can be read without a cluster.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import NodeExists, NoSuchNode, UndecodableNode
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.meta.update import until_known

KEPT_MAX = 100
"""Maximum number of records. When the limit is reached, recording a snapshot deletes the oldest record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """The cluster's record of a finished snapshot."""

    kind: str
    parent: str | None
    started_ms: int
    """Time in milliseconds since 1970. Everything that was acknowledged before it is in the snapshot."""
    ended_ms: int
    rows: int
    size_bytes: int
    where: str
    """Directory of the snapshot, as the job that took the snapshot names it."""


async def record_snapshot(store: MetadataStore, snapshot: str, record: SnapshotRecord) -> None:
    """Record a snapshot. Idempotent. Raises MetadataError."""
    await ensure_path(store, paths.SNAPSHOTS)
    data = codec.encode(record)

    async def create() -> None:
        try:
            await store.create(paths.snapshot(snapshot), data)
        except NodeExists:
            return

    await until_known(create)
    names = await store.children(paths.SNAPSHOTS)
    for name in names[:-KEPT_MAX]:  # ids begin with their time
        await forget_snapshot(store, name)


async def forget_snapshot(store: MetadataStore, snapshot: str) -> None:
    """Delete the record of a snapshot. Idempotent. Raises MetadataError."""

    async def delete() -> None:
        try:
            await store.delete(paths.snapshot(snapshot), -1)
        except NoSuchNode:
            return

    await until_known(delete)


async def all_snapshots(store: MetadataStore) -> list[tuple[str, SnapshotRecord]]:
    """Return the id and the record of every snapshot, oldest first. Records that this version cannot read are left
    out. Raises MetadataError."""
    try:
        names = await store.children(paths.SNAPSHOTS)
    except NoSuchNode:
        return []
    found = []
    for name in names[-KEPT_MAX:]:
        with suppress(NoSuchNode, UndecodableNode):
            data, _ = await store.get(paths.snapshot(name))
            found.append((name, codec.decode(SnapshotRecord, data, what=paths.snapshot(name))))
    return found


async def last_snapshot_or_none(store: MetadataStore) -> SnapshotRecord | None:
    """Return the record of the most recently started snapshot, or None if there are no records. Raises
    MetadataError."""
    try:
        names = await store.children(paths.SNAPSHOTS)
    except NoSuchNode:
        return None
    for name in reversed(names):
        try:
            data, _ = await store.get(paths.snapshot(name))
        except NoSuchNode:
            continue
        with suppress(UndecodableNode):  # possibly of a later version: use the one before it
            return codec.decode(SnapshotRecord, data, what=paths.snapshot(name))
    return None
