"""The last snapshot in a node's metrics, and the records of snapshots in the metadata store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.env.real import real_env
from kvstore.meta import paths, snapshots
from kvstore.meta.memory import MemoryStore
from kvstore.meta.snapshots import SnapshotRecord, forget_snapshot, last_snapshot_or_none, record_snapshot
from kvstore.server.http.last_snapshot import LastSnapshot
from tests.waiting import wait_until


def record(started_ms: int, rows: int = 3) -> SnapshotRecord:
    return SnapshotRecord(
        kind="full",
        parent=None,
        started_ms=started_ms,
        ended_ms=started_ms + 1,
        rows=rows,
        size_bytes=10,
        where="/snapshots",
    )


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    yield store
    await store.close()


async def test_node_reports_a_new_snapshot_soon_after_it_is_recorded(store: MemoryStore, tmp_path: Path) -> None:
    env = real_env(tmp_path, name="n1")
    last = LastSnapshot(env, store)
    assert not last.is_read, "a start is no lack of snapshots"
    last.start()
    try:

        async def is_read() -> bool:
            return last.is_read

        await wait_until(is_read, what="the node knows that there is none")
        assert last.statistics() == {}, "no snapshot is no fresh one"
        now_ms = time.time_ns() // 1_000_000
        await record_snapshot(store, "20260102T000000Z-full-0a1b", record(now_ms - 60_000, rows=7))
        await record_snapshot(store, "20260101T000000Z-full-ffff", record(now_ms - 90_000))

        async def is_told() -> bool:
            return last.statistics().get("snapshot_rows") == 7

        await wait_until(is_told, what="the snapshot is told")
        assert 60 <= last.statistics()["snapshot_age_s"] < 90
    finally:
        await last.close()
        await env.nursery.close()


async def test_recording_a_snapshot_again_changes_nothing(store: MemoryStore) -> None:
    for _ in range(2):
        await record_snapshot(store, "a", record(1))
    assert await store.children(paths.SNAPSHOTS) == ["a"]


async def test_only_the_newest_snapshots_are_remembered(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "KEPT_MAX", 2)
    for name in ("a", "b", "c"):
        await record_snapshot(store, name, record(1))
    assert await store.children(paths.SNAPSHOTS) == ["b", "c"]


async def test_forgotten_snapshot_is_not_the_last(store: MemoryStore) -> None:
    assert await last_snapshot_or_none(store) is None
    await record_snapshot(store, "a", record(1))
    await record_snapshot(store, "b", record(2))
    await forget_snapshot(store, "b")
    await forget_snapshot(store, "b")
    assert await last_snapshot_or_none(store) == record(1)
