"""The high-water mark of one node: what confirms a count, what a file or a node of the store says, and what does not
(docs/protocol.md, B29)."""

from __future__ import annotations

from collections.abc import Callable
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.disk import DirectoryDisk
from kvstore.meta import paths
from kvstore.meta.history import high_water
from kvstore.meta.history.high_water import DIGITS_MAX, FILE, GONE, HighWater, _line, _read, _write
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore
from kvstore.meta.store import Delete, SetData
from kvstore.os_errors import SyncFailed
from tests.meta.drivers import ClosedStore
from tests.meta.history.interleaved import Interleaved, count_of

CLUSTER = "7c2d2a3e-0000-4000-8000-000000000001"


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await store.create("/ledgers")
    return store


def mark_of(store: MemoryStore, directory: Path, node: str) -> HighWater:
    return HighWater(store, DirectoryDisk(directory / node), node, CLUSTER)


async def test_high_water_of_two_processes_of_a_node_never_falls(store: MemoryStore, tmp_path: Path) -> None:
    first, second = (HighWater(store, DirectoryDisk(tmp_path), "n1", CLUSTER) for _ in range(2))
    for each in (first, second, second, first):
        await each.raise_it(rings=True)
        await each.confirm()
        assert await each.why_older() == ""
    assert (first.confirmed, second.confirmed) == (4, 3)


# docs/protocol.md P34
async def test_mark_closed_to_our_user_leaves_a_majority_to_confirm(tmp_path: Path) -> None:
    store = ClosedStore()
    await LayoutStore(store).initialise(CLUSTER)
    marks = {node: mark_of(store, tmp_path, node) for node in ("a", "b", "c")}
    for each in marks.values():
        await each.raise_it(rings=False)
    store.closed = frozenset({paths.high_water("c")})
    await marks["a"].raise_it(rings=True)
    await marks["a"].confirm()
    assert marks["a"].confirmed == 0, "one of three"
    await marks["b"].raise_it(rings=False)
    await marks["a"].confirm()
    assert marks["a"].confirmed == 2


# docs/protocol.md B29
async def test_high_water_is_confirmed_again_after_every_node_was_replaced(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was replaced may come back: its own mark does not make the store an older copy."""
    monkeypatch.setattr(high_water, "RINGS_MAX", 20)
    marks = {node: mark_of(store, tmp_path, node) for node in ("a", "b", "c", "x", "y")}

    async def ring(first: str, *others: str) -> bool:
        before = marks[first].confirmed
        await marks[first].raise_it(rings=True)
        for each in others:
            await marks[each].raise_it(rings=False)
        await marks[first].confirm()
        return marks[first].confirmed > before

    assert [await ring(*nodes) for nodes in ("abc", "bca", "cab")] == [True] * 3
    assert not any([await ring("x", "y") for _ in range(20)]), "two of five"
    await ring("x", "y")
    assert await ring("x", "y")
    assert await marks["a"].why_older() == ""
    assert await ring("a", "x", "y")
    assert not await ring("x"), "three nodes now"


# docs/protocol.md B29
async def test_high_water_needs_a_majority_however_many_nodes_have_left(store: MemoryStore, tmp_path: Path) -> None:
    marks = {node: mark_of(store, tmp_path, node) for node in ("x", "y", "z")}
    for each in marks.values():
        await each.raise_it(rings=False)
    for number in range(60):
        await store.create(paths.high_water(f"left-{number:02}"), high_water.GONE)
    await marks["x"].raise_it(rings=True)
    await marks["x"].confirm()
    assert marks["x"].is_pending, "one of three"
    await marks["y"].raise_it(rings=False)
    await marks["x"].confirm()
    assert marks["x"].confirmed == 2


# docs/protocol.md B29
async def test_half_of_the_nodes_confirm_nothing(store: MemoryStore, tmp_path: Path) -> None:
    marks = {node: mark_of(store, tmp_path, node) for node in "abcd"}
    for each in marks.values():
        await each.raise_it(rings=False)
    await marks["a"].raise_it(rings=True)
    for node in "bc":
        await marks["a"].confirm()
        assert marks["a"].is_pending
        await marks[node].raise_it(rings=False)
    await marks["a"].confirm()
    assert marks["a"].confirmed == 2


# docs/protocol.md B29
async def test_count_below_the_confirmed_one_is_not_raised(store: MemoryStore, tmp_path: Path) -> None:
    """The store is an older copy, and nobody may take it for the later one because the counts have caught up."""
    mark = mark_of(store, tmp_path, "a")
    for _ in range(3):
        await mark.raise_it(rings=True)
        await mark.confirm()
    await store.set(paths.high_water("a"), b"1", -1)
    await mark.raise_it(rings=True)
    assert not mark.is_pending
    assert count_of(store.tree, "a") == b"1"


async def test_ring_that_comes_between_is_answered(store: MemoryStore, tmp_path: Path) -> None:
    """A node that rings counts only its own ring as answered."""
    a, b = mark_of(store, tmp_path, "a"), mark_of(store, tmp_path, "b")
    await b.raise_it(rings=True)
    await a.raise_it(rings=True)
    assert [await a.is_rung(), await a.is_rung()] == [True, False]
    await a.raise_it(rings=True)
    assert not await a.is_rung(), "its own"
    assert [await b.is_rung(), await b.is_rung()] == [True, False]


@pytest.mark.parametrize("how", ["raised", "removed"])
async def test_node_that_answers_at_the_last_moment_has_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(high_water, "RINGS_MAX", 2)
    store = Interleaved(MemoryStore().tree)
    await store.create("/ledgers")
    a, b = mark_of(store, tmp_path, "a"), mark_of(store, tmp_path, "b")
    await b.raise_it(rings=False)
    path, session = paths.high_water("b"), store.tree.open_session()
    steps: dict[str, Callable[[], None]] = {
        "raised": lambda: store.tree.apply(session, [SetData(path, b"2", -1)]),
        "removed": lambda: store.tree.apply(session, [Delete(path, -1)]),
    }
    await a.raise_it(rings=True)
    await a.raise_it(rings=True)
    store.before("set", path, steps[how])
    await a.raise_it(rings=True)
    assert store.count("set", path) == 1
    assert (await store.children(paths.HIGH_WATER)) == (["a", "b"] if how == "raised" else ["a"])
    if how == "raised":
        assert count_of(store.tree, "b") == b"2"


async def test_node_that_has_left_is_no_garbage(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = mark_of(store, tmp_path, "a")
    for found, said in ((GONE, ""), (b"9" * (DIGITS_MAX + 1), "expected at most")):
        caplog.clear()
        await store_count(store, found)
        assert await mark.why_older() == ""
        assert said in caplog.text
        assert bool(caplog.text) is bool(said)


async def store_count(store: MemoryStore, data: bytes) -> None:
    if not store.tree.paths().count(paths.HIGH_WATER):
        await store.create(paths.HIGH_WATER)
        await store.create(paths.high_water("a"))
    await store.set(paths.high_water("a"), data, -1)


class WatchedDisk(DirectoryDisk):
    """Records what is synced, and in which order. A sync fails if `error` is given."""

    def __init__(self, directory: Path, error: OSError | None = None) -> None:
        super().__init__(directory)
        self.done: list[str] = []
        self._error = error

    def sync_dir(self, path: str) -> None:
        self.done.append("directory")
        super().sync_dir(path)

    def open(self, path: str, *, create: bool = False) -> Any:
        file = super().open(path, create=create)
        submit = file.submit_sync

        def submit_sync(done: Callable[[OSError | None], None]) -> None:
            def over(error: OSError | None) -> None:
                self.done.append("file")
                done(error or self._error)

            submit(over)

        file.submit_sync = submit_sync  # type: ignore[method-assign]
        return file


async def test_confirmed_count_is_synced_before_it_counts(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    await _write(disk, "a", CLUSTER, 1)
    assert disk.done == ["directory", "file"]
    await _write(disk, "a", CLUSTER, 2)
    assert disk.done[2:] == ["file"]
    assert _read(disk, "a", CLUSTER) == 2


async def test_failed_sync_of_the_confirmed_count_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SyncFailed):
        await _write(WatchedDisk(tmp_path, SyncFailed(EIO, "test")), "a", CLUSTER, 1)


def test_file_that_cannot_be_read_proves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).mkdir()
    assert _read(DirectoryDisk(tmp_path), "a", CLUSTER) == 0
    assert "cannot be read" in caplog.text
    (tmp_path / FILE).rmdir()
    (tmp_path / FILE).write_bytes(_line(CLUSTER.encode(), b"a", 7))
    assert _read(DirectoryDisk(tmp_path), "a", CLUSTER) == 7
