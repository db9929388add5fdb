"""An older copy of the metadata is recognised before anything is read of it, and nothing else is taken for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.env.disk import DirectoryDisk
from kvstore.errors import MetadataLost, MetadataUnavailable, NoSuchNode, OlderMetadata
from kvstore.meta import paths
from kvstore.meta.history import verifier
from kvstore.meta.history.high_water import FILE, _line
from kvstore.meta.history.seen import SeenVersions, Version
from kvstore.meta.history.verified import VerifiedStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.memory_tree import TreeNode
from kvstore.meta.store import Create, SessionState, SetData, Stat
from tests.meta.drivers import FaultyStore, Hint, LaggingStore, States, TestNursery
from tests.waiting import wait_until

CLUSTER = "7c2d2a3e-0000-4000-8000-000000000001"
SAID = "older copy of itself"


class Ensemble:
    """A metadata store that can be restored to a copy, under sessions that continue."""

    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.stores: list[MemoryStore] = []

    def session(self) -> MemoryStore:
        self.stores.append(FaultyStore(self.tree))
        return self.stores[-1]

    def copy(self) -> dict[str, TreeNode]:
        return dict(self.tree._nodes)

    def restore(self, copy: dict[str, TreeNode], *, reconnects: bool = True) -> None:
        """Restore a copy. Sessions continue, as ZooKeeper's do, and transactions are above all former ones."""
        for store in self.stores:
            store.suspend()
        self.tree._nodes = dict(copy)
        for store in self.stores if reconnects else ():
            store.resume()


@pytest.fixture
async def ensemble(monkeypatch: pytest.MonkeyPatch) -> Ensemble:
    monkeypatch.setattr(verifier, "RAISE_S", 0.01)
    monkeypatch.setattr(verifier, "RETRY_S", 0.01)
    ensemble = Ensemble()
    await LayoutStore(ensemble.session()).initialise(CLUSTER)
    return ensemble


@asynccontextmanager
async def opened(inner: MemoryStore, directory: Path, node: str = "n1") -> AsyncIterator[VerifiedStore]:
    nursery = TestNursery()
    store = VerifiedStore(inner, DirectoryDisk(directory), node)
    try:
        await store.open(nursery)
        yield store
    finally:
        await nursery.close()


async def settled(store: VerifiedStore) -> None:
    """Wait until the store has acknowledged a mark of everything that has happened."""

    async def is_settled() -> bool:
        mark = store._verifier.mark
        is_confirmed = mark is not None and mark.confirmed > 0 and not mark.is_pending
        return is_confirmed and not store._verifier.has_news and store._verifier.is_open

    await wait_until(is_settled)


# docs/protocol.md B29
async def test_older_copy_is_refused_before_the_first_call_and_later_one_is_used(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    inner = ensemble.session()
    async with opened(inner, tmp_path) as store:
        await store.create("/list", b"0")
        await settled(store)
        older = ensemble.copy()
        await store.set("/list", b"1", 0)
        await settled(store)
        later = ensemble.copy()
        states, hint = States(store), Hint()
        store.watch("/list", hint)
        ensemble.restore(older)
        with pytest.raises(MetadataUnavailable):
            await store.get("/list")
        await states.wait_for(SessionState.OLDER)
        await hint.wait()
        reads = store.get("/list"), store.children("/"), store.sync("/")
        writes = store.create("/new"), store.set("/list", b"2", 0), store.delete("/list", -1)
        for call in (*reads, *writes, store.multi([SetData("/list", b"", -1)])):
            with pytest.raises(OlderMetadata, match=SAID):
                await call
        assert paths.OLDER_COPY in ensemble.tree.paths(), "others are told"
        ensemble.restore(later)
        await states.wait_for(SessionState.CONNECTED)
        assert (await store.get("/list"))[0] == b"1"


# docs/protocol.md B29
async def test_older_copy_is_recognised_at_the_start_by_the_file(ensemble: Ensemble, tmp_path: Path) -> None:
    async with opened(ensemble.session(), tmp_path) as store:
        await store.create("/a")
        await settled(store)
        older = ensemble.copy()
        await store.create("/b")
        await settled(store)
    later = ensemble.copy()
    ensemble.restore(older)
    with pytest.raises(MetadataLost, match=SAID):
        async with opened(ensemble.session(), tmp_path):
            pass
    assert paths.OLDER_COPY in ensemble.tree.paths()
    with pytest.raises(MetadataLost, match=SAID):
        async with opened(ensemble.session(), tmp_path / "another", node="n2"):
            pass
    ensemble.restore(later)
    async with opened(ensemble.session(), tmp_path) as store:
        assert "b" in await store.children("/")


# docs/protocol.md B29
async def test_version_below_one_seen_before_is_an_older_copy(ensemble: Ensemble, tmp_path: Path) -> None:
    """Also if the copy has the mark: nothing was new to this process when the copy was made."""
    inner, other = ensemble.session(), ensemble.session()
    async with opened(inner, tmp_path) as store:
        await other.create("/list", b"0")
        older = ensemble.copy()
        await other.set("/list", b"1", 0)
        assert (await store.get("/list"))[0] == b"1"
        ensemble.restore(older)
        states = States(store)
        await states.wait_for(SessionState.CONNECTED)
        with pytest.raises(OlderMetadata, match="/list has version 0, and version 1 was seen"):
            await store.get("/list")


# docs/protocol.md B29
async def test_copy_with_a_lower_version_stays_refused_until_it_has_that_version(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    inner, other = ensemble.session(), ensemble.session()
    async with opened(inner, tmp_path) as store:
        await other.create("/list", b"0")
        older = ensemble.copy()
        await other.set("/list", b"1", 0)
        await store.get("/list")
        later = ensemble.copy()
        states = States(store)
        ensemble.restore(older)
        await states.wait_for(SessionState.CONNECTED)
        with pytest.raises(OlderMetadata):
            await store.get("/list")
        states.seen.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20 * verifier.RAISE_S):
                await states.wait_for(SessionState.CONNECTED)
        with pytest.raises(OlderMetadata):
            await store.children("/")
        assert paths.OLDER_COPY not in ensemble.tree.paths()
        ensemble.restore(later)
        await states.wait_for(SessionState.CONNECTED)
        assert (await store.get("/list"))[0] == b"1"


# docs/protocol.md B29
async def test_later_copy_is_used_after_several_connections_to_the_older_one(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    """The process has seen nothing later than the copy, so it uses the copy until another node marks it."""
    inner, other = ensemble.session(), ensemble.session()
    async with opened(inner, tmp_path) as store:
        await other.create("/list", b"0")
        older = ensemble.copy()
        await other.set("/list", b"1", 0)
        later = ensemble.copy()
        states = States(store)
        ensemble.restore(older)
        await states.wait_for(SessionState.CONNECTED)
        for version in range(3):
            await store.set("/list", b"unacknowledged", version)
            await store.get("/list")
        states.seen.clear()
        ensemble.restore(ensemble.copy())
        await states.wait_for(SessionState.CONNECTED)
        await ensemble.stores[0].create(paths.OLDER_COPY, b"n2 says so")
        await states.wait_for(SessionState.OLDER)
        states.seen.clear()
        ensemble.restore(later)
        await states.wait_for(SessionState.CONNECTED)
        assert (await store.get("/list"))[0] == b"1"


async def test_process_that_writes_sees_its_own_versions(ensemble: Ensemble, tmp_path: Path) -> None:
    async with opened(ensemble.session(), tmp_path) as store:
        await store.multi([Create("/a"), Create("/b")])
        for path in ("/a", "/b"):
            await store.get(path)
        await store.set("/a", b"", 0)
        await store.multi([SetData("/b", b"", 0)])
        for path in ("/a", "/b"):
            known = store._verifier.seen.highest(path)
            assert known is not None
            assert known.number == 1


class Lagging(LaggingStore):
    """A member that lags until it takes part in a request on which all agree. A sync does not suffice, as with a
    deposed leader."""

    async def sync(self, path: str) -> None:
        await MemoryStore.sync(self, path)

    async def delete(self, path: str, version: int) -> None:
        self._old = None
        await super().delete(path, version)


# docs/protocol.md B29
async def test_server_that_lags_is_not_an_older_copy(ensemble: Ensemble, tmp_path: Path) -> None:
    inner = Lagging(ensemble.tree)
    async with opened(inner, tmp_path) as store:
        await store.create("/list", b"0")
        old = {path: ensemble.tree.get(path) for path in ensemble.tree.paths()}
        await store.set("/list", b"1", 0)
        await store.get("/list")
        await settled(store)
        inner._old = old
        assert (await store.get("/list"))[0] == b"1"
        states = States(store)
        inner.suspend()
        inner._old = old
        inner.resume()
        await states.wait_for(SessionState.CONNECTED)
        assert SessionState.OLDER not in states.seen
    inner._old = old
    async with opened(inner, tmp_path) as store:
        assert (await store.get("/list"))[0] == b"1"


# docs/protocol.md B29
async def test_write_of_unknown_outcome_does_not_count_as_acknowledged(ensemble: Ensemble, tmp_path: Path) -> None:
    inner = ensemble.session()
    assert isinstance(inner, FaultyStore)
    async with opened(inner, tmp_path) as store:
        for kind in ("lost", "done"):
            await store.create(f"/{kind}")
            await settled(store)
            inner.faults = [("set", kind)]
            await store.create(f"/{kind}-again")
            await settled(store)
        before = ensemble.copy()
        mark = store._verifier.mark
        assert mark is not None
        assert mark.confirmed == int(before[paths.high_water("n1")].data)
        states = States(store)
        ensemble.restore(before)
        await states.wait_for(SessionState.CONNECTED)


# docs/protocol.md B29
async def test_mark_of_another_process_ends_the_use_of_the_store(ensemble: Ensemble, tmp_path: Path) -> None:
    async with opened(ensemble.session(), tmp_path) as store:
        states = States(store)
        await ensemble.stores[0].create(paths.OLDER_COPY, b"b1 says so")
        await states.wait_for(SessionState.OLDER)
        with pytest.raises(OlderMetadata, match="b1 says so"):
            await store.get("/ledgers")
        await ensemble.stores[0].delete(paths.OLDER_COPY, -1)
        await states.wait_for(SessionState.CONNECTED)


# docs/protocol.md B29
async def test_damaged_file_does_not_make_the_store_an_older_copy(ensemble: Ensemble, tmp_path: Path) -> None:
    """A single flipped bit would stop every node of the cluster."""
    async with opened(ensemble.session(), tmp_path) as store:
        await store.create("/a")
        await settled(store)
    text = (tmp_path / FILE).read_bytes()
    at = text.index(b" 1") + 1
    (tmp_path / FILE).write_bytes(text[:at] + b"9" + text[at + 1 :])
    async with opened(ensemble.session(), tmp_path) as store:
        assert "a" in await store.children("/")
        assert paths.OLDER_COPY not in ensemble.tree.paths()


# docs/protocol.md P34
@pytest.mark.parametrize("node", ["n1", "n2"])
async def test_garbage_in_a_mark_stops_no_node_and_is_replaced(ensemble: Ensemble, tmp_path: Path, node: str) -> None:
    async with opened(ensemble.session(), tmp_path / "1") as first, opened(ensemble.session(), tmp_path / "2", "n2"):
        await first.create("/a")
        await settled(first)
        ensemble.tree._nodes[paths.high_water(node)].data = b"\xff garbage"
        states = States(first)
        ensemble.restore(ensemble.copy())
        await states.wait_for(SessionState.CONNECTED)
        mark = first._verifier.mark
        assert mark is not None
        before = mark.confirmed
        await first.create("/b")
        await settled(first)
        assert mark.confirmed > before
    async with opened(ensemble.session(), tmp_path / "1") as first:
        assert "b" in await first.children("/")


OTHERS = _line(b"another-cluster", b"n1", 9), _line(CLUSTER.encode(), b"n2", 9)


@pytest.mark.parametrize("said", [*OTHERS, b"torn", b""])
async def test_file_of_another_cluster_or_node_proves_nothing(ensemble: Ensemble, tmp_path: Path, said: bytes) -> None:
    (tmp_path / FILE).write_bytes(said)
    async with opened(ensemble.session(), tmp_path) as store:
        await store.create("/a")
        await settled(store)
    assert (tmp_path / FILE).read_text().split("\n")[0].split()[:3] == [CLUSTER, "n1", "1"]


async def test_unchanged_metadata_cost_no_writes(ensemble: Ensemble, tmp_path: Path) -> None:
    inner = ensemble.session()
    assert isinstance(inner, FaultyStore)
    async with opened(inner, tmp_path) as store:
        await store.create("/a")
        await settled(store)
        inner.calls.clear()
        ended = asyncio.get_running_loop().time() + 20 * verifier.RAISE_S

        async def is_over() -> bool:
            await store.get("/a")
            return asyncio.get_running_loop().time() > ended

        await wait_until(is_over)
        assert set(inner.calls) == {"get"}


async def test_store_without_the_cluster_is_judged_by_other_checks(ensemble: Ensemble, tmp_path: Path) -> None:
    """docs/protocol.md G23: a store that was formatted is another cluster or none, and not a copy."""
    async with opened(ensemble.session(), tmp_path) as store:
        await store.create("/a")
        await settled(store)
        states = States(store)
        ensemble.restore({"/": MemoryTree()._nodes["/"]})
        await states.wait_for(SessionState.CONNECTED)
        with pytest.raises(NoSuchNode):
            await store.get(paths.INSTANCE_ID)


def test_seen_versions_are_bounded_and_recognise_a_recreated_node() -> None:
    seen = SeenVersions(paths_max=2)
    assert seen.note("/a", Stat(5, 10, 0, 0))
    assert not seen.note("/a", Stat(4, 10, 0, 0))
    assert seen.note("/a", Stat(0, 11, 0, 0)), "deleted, and made again"
    assert seen.note("/b", Stat(0, 12, 0, 0))
    assert seen.note("/c", Stat(0, 13, 0, 0))
    assert (seen.highest("/a"), seen.highest("/c")) == (None, Version(13, 0))
    assert seen.note("/b", Stat(0, 12, 0, 0)), "used last"
    assert seen.note("/d", Stat(3, 14, 0, 0))
    assert (seen.highest("/b"), seen.highest("/c")) == (Version(12, 0), None)
    seen.note_written("/d", 2)
    assert seen.highest("/d") == Version(14, 3)
