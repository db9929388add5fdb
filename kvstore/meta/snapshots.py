"""The cluster's record of its snapshots: one node each under /snapshots. So servers can say how old the last one is.

The snapshots themselves are elsewhere, and need no cluster to be read.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import NodeExists, NoSuchNode, UndecodableNode
from kvstore.meta import codec, paths
from kvstore.meta.store import MetadataStore, ensure_path
from kvstore.meta.update import until_known

KEPT_MAX = 100
"""Older ones are forgotten when another one is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """A finished snapshot."""

    kind: str
    parent: str | None
    started_ms: int
    """Everything that was acknowledged before is in it."""
    ended_ms: int
    rows: int
    size_bytes: int
    where: str
    """The directory, as the job that took it calls it."""


async def record_snapshot(store: MetadataStore, snapshot: str, record: SnapshotRecord) -> None:
    """Once or more, always with the same. Raises MetadataError."""
    await ensure_path(store, paths.SNAPSHOTS)
    data = codec.encode(record)

    async def create() -> None:
        try:
            await store.create(paths.snapshot(snapshot), data)
        except NodeExists:
            return

    await until_known(create)
    names = await store.children(paths.SNAPSHOTS)
    for name in names[:-KEPT_MAX]:  # ids begin with their moment
        await forget_snapshot(store, name)


async def forget_snapshot(store: MetadataStore, snapshot: str) -> None:
    """No error if it is not known. Raises MetadataError."""

    async def delete() -> None:
        try:
            await store.delete(paths.snapshot(snapshot), -1)
        except NoSuchNode:
            return

    await until_known(delete)


async def last_snapshot_or_none(store: MetadataStore) -> SnapshotRecord | None:
    """The one that was started last. Raises MetadataError."""
    try:
        names = await store.children(paths.SNAPSHOTS)
    except NoSuchNode:
        return None
    for name in reversed(names):
        try:
            data, _ = await store.get(paths.snapshot(name))
        except NoSuchNode:
            continue
        with suppress(UndecodableNode):  # of a later version perhaps: the one before it is told
            return codec.decode(SnapshotRecord, data, what=paths.snapshot(name))
    return None
