"""One check of the verifier at a time, with what may happen between two of its calls (docs/protocol.md, B29)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from kvstore.env.disk import DirectoryDisk
from kvstore.errors import MetadataLost, MetadataUnavailable, OlderMetadata
from kvstore.meta import paths
from kvstore.meta.history import high_water, verifier
from kvstore.meta.history.high_water import BARRIER, HighWater
from kvstore.meta.history.verified import VerifiedStore
from kvstore.meta.history.verifier import CONFIRM_ROUNDS, Verifier
from kvstore.meta.layout import LayoutStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import Create, SessionState, SetData
from tests.meta.drivers import Hint, LaggingStore, States, TestNursery, let_run
from tests.meta.history.interleaved import Interleaved, count_of
from tests.waiting import wait_until

CLUSTER = "7c2d2a3e-0000-4000-8000-000000000001"
LIST = "/list"


class Idle(TestNursery):
    """Starts nothing in the background, so that a test decides when each round runs."""

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        work.close()
        return asyncio.get_running_loop().create_task(asyncio.sleep(0), name=name)


class Round:
    """A verifier whose rounds a test runs one by one, its store, and another session of the same store."""

    def __init__(self, tree: MemoryTree, directory: Path) -> None:
        self.tree, self.inner, self.other = tree, Interleaved(tree), MemoryStore(tree)
        self.changes = 0
        self.verifier = Verifier(self.inner, DirectoryDisk(directory), "n1", self._count)

    def _count(self) -> None:
        self.changes += 1

    async def started(self) -> Round:
        await self.verifier.start(Idle())
        return self

    @property
    def mark(self) -> HighWater:
        assert self.verifier.mark is not None
        return self.verifier.mark

    async def verify(self) -> None:
        await self.verifier._verify()

    async def confirm_or_raise(self) -> None:
        await self.verifier._raise(self.mark)

    async def mark_of_another(self, node: str = "n2") -> HighWater:
        """Return the mark of another node, of whose answers a majority depends from now on."""
        mark = HighWater(self.other, self.verifier._disk, node, CLUSTER)
        await mark.raise_it(rings=False)
        return mark

    async def pending(self) -> None:
        """Raise the mark. Another node has to answer before it is confirmed."""
        await self.mark_of_another()
        self.verifier.news += 1
        await self.confirm_or_raise()
        assert self.mark.is_pending


@pytest.fixture
async def tree() -> MemoryTree:
    tree = MemoryTree()
    await LayoutStore(MemoryStore(tree)).initialise(CLUSTER)
    return tree


@pytest.fixture
async def of(tree: MemoryTree, tmp_path: Path) -> Round:
    return await Round(tree, tmp_path).started()


# ── trust ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_driver_trusts_a_new_connection_only_when_it_is_verified(of: Round) -> None:
    history = of.inner.recorded
    assert history.trusted == {1: True}
    of.inner.blink()
    await let_run()
    assert history.trusted == {1: True, 2: False}
    await of.verify()
    assert history.trusted == {1: True, 2: True}
    await of.other.create(paths.OLDER_COPY, b"n2 says so")
    await let_run()
    assert history.is_trusted, "nothing is known yet"
    await of.verify()
    assert not history.is_trusted


async def test_driver_does_not_trust_a_connection_with_a_lower_version(of: Round) -> None:
    await lower_version(of)
    with pytest.raises(OlderMetadata):
        await of.verifier.judge(LIST)
    assert not of.inner.recorded.is_trusted


async def lower_version(of: Round) -> None:
    """Let the store have a lower version of LIST than was seen."""
    await of.other.create(LIST)
    _, stat = await of.other.get(LIST)
    of.verifier.seen.note(LIST, stat._replace(version=1))


# ── a connection that changes during the verification ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [paths.OLDER_COPY, paths.INSTANCE_ID, paths.high_water("n1")])
async def test_finding_of_a_former_connection_decides_nothing(of: Round, path: str) -> None:
    of.inner.before("get", path, of.inner.blink)
    await of.verify()
    assert not of.verifier.is_open
    assert not of.inner.recorded.is_trusted
    assert of.verifier._wake.is_set(), "the new connection is verified at once"
    await of.verify()
    assert of.verifier.is_open


async def test_start_verifies_a_new_connection_at_once(tree: MemoryTree, tmp_path: Path) -> None:
    """The driver reports the new connection to nobody yet."""
    of = Round(tree, tmp_path)
    of.inner.before("get", paths.OLDER_COPY, of.inner.blink)
    await of.started()
    assert not of.verifier.is_open
    assert of.verifier._wake.is_set()


async def test_new_connection_is_not_trusted_while_a_lower_version_is_read_again(of: Round) -> None:
    await lower_version(of)
    with pytest.raises(OlderMetadata):
        await of.verifier.judge(LIST)
    await of.other.set(LIST, b"", 0)
    of.inner.before("delete", BARRIER, of.inner.blink)
    await of.verify()
    await let_run()
    assert not of.inner.recorded.is_trusted
    assert not of.verifier.is_open


async def test_connection_that_breaks_while_a_version_is_judged_proves_nothing(of: Round) -> None:
    await lower_version(of)
    of.inner.before("get", LIST, of.inner.blink)
    with pytest.raises(MetadataUnavailable, match="the connection broke"):
        await of.verifier.judge(LIST)
    assert not of.verifier.older


async def test_disconnected_store_is_asked_nothing(of: Round) -> None:
    of.inner.suspend()
    of.inner.calls.clear()
    await of.verify()
    assert of.inner.calls == []


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_judged_version_is_the_highest_from_then_on(of: Round) -> None:
    """The first read came from a server that lagged."""
    await of.other.create(LIST)
    await of.other.set(LIST, b"1", 0)
    _, stat = await of.other.get(LIST)
    of.verifier.seen.note(LIST, stat)
    await of.other.set(LIST, b"2", 1)
    assert (await of.verifier.judge(LIST))[0] == b"2"
    known = of.verifier.seen.highest(LIST)
    assert known is not None
    assert known.number == 2


class Behind(Interleaved):
    """A server that lags until it takes part in a request on which a majority agrees."""

    lagging: dict[str, Any] | None = None

    async def get(self, path: str) -> tuple[bytes, Any]:
        found = await super().get(path)
        return self.lagging[path] if self.lagging and path in self.lagging else found

    async def delete(self, path: str, version: int) -> None:
        self.lagging = None
        await super().delete(path, version)


async def test_lower_version_of_a_server_that_lags_does_not_last(tree: MemoryTree, tmp_path: Path) -> None:
    of = Round(tree, tmp_path)
    of.inner = Behind(tree)
    of.verifier = Verifier(of.inner, DirectoryDisk(tmp_path), "n1", of._count)
    await of.started()
    await lower_version(of)
    with pytest.raises(OlderMetadata):
        await of.verifier.judge(LIST)
    before = await of.other.get(LIST)
    await of.other.set(LIST, b"", 0)
    of.inner.lagging = {LIST: before}
    await of.verify()
    assert of.verifier.is_open
    of.inner.calls.clear()
    await of.verify()
    assert of.inner.count("get", LIST) == 0, "the version was there"


# ── marks of an older copy ────────────────────────────────────────────────────────────────────────────────────────────


async def test_mark_that_an_operator_removes_is_not_made_again(of: Round) -> None:
    await of.other.create(paths.OLDER_COPY, b"n2 says so")
    of.inner.before("create", paths.OLDER_COPY, lambda: remove(of.tree, paths.OLDER_COPY))
    await of.verify()
    assert of.inner.count("create", paths.OLDER_COPY) == 0
    assert of.verifier.older == "n2 says so"


def remove(tree: MemoryTree, path: str) -> None:
    del tree._nodes[path]


async def test_start_names_the_older_copy_if_another_node_marks_it_first(tree: MemoryTree, tmp_path: Path) -> None:
    first = await Round(tree, tmp_path).started()
    first.mark.confirmed = 9
    await high_water._write(DirectoryDisk(tmp_path), "n1", CLUSTER, 9)
    again = Round(tree, tmp_path)
    other = first.other.tree.open_session()
    again.inner.before("create", paths.OLDER_COPY, lambda: tree.apply(other, [Create(paths.OLDER_COPY, b"n2 says so")]))
    with pytest.raises(MetadataLost, match="high-water mark 0 of node n1, and 9 was confirmed"):
        await again.started()


async def test_cluster_that_a_lagging_server_does_not_show_is_found(tree: MemoryTree, tmp_path: Path) -> None:
    inner = LaggingStore(tree)
    inner._old = {"/": tree.get("/")}
    verifier = Verifier(inner, DirectoryDisk(tmp_path), "n1", lambda: None)
    await verifier.start(Idle())
    assert verifier.mark is not None


# ── the high-water mark ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_count_of_an_older_copy_is_never_confirmed(of: Round) -> None:
    await of.pending()
    await of.other.create(paths.OLDER_COPY, b"n2 says so")
    await of.verify()
    assert not of.mark.is_pending


async def test_count_of_a_former_connection_is_never_confirmed(of: Round) -> None:
    """The former connection may have led to another copy."""
    await of.pending()
    of.inner.blink()
    await of.verify()
    assert not of.mark.is_pending


async def test_count_stays_pending_when_the_same_connection_is_verified_again(of: Round) -> None:
    await of.pending()
    await of.verify()
    assert of.mark.is_pending


async def test_pending_count_is_raised_again_after_some_rounds(of: Round) -> None:
    await of.pending()
    before = count_of(of.tree, "n1")
    of.verifier.news += 1
    for _ in range(CONFIRM_ROUNDS - 1):
        await let_run()
        await of.confirm_or_raise()
        assert count_of(of.tree, "n1") == before, "its own ring is no other node's"
    await of.confirm_or_raise()
    assert int(count_of(of.tree, "n1")) == int(before) + 1


async def test_pending_count_is_raised_at_once_for_another_node(of: Round) -> None:
    """Two nodes that waited for one another would never confirm."""
    others = [await of.mark_of_another(node) for node in ("n3", "n4", "n5")]
    await of.pending()
    await of.confirm_or_raise()
    before = count_of(of.tree, "n1")
    await others[0].raise_it(rings=True)
    await let_run()
    await of.confirm_or_raise()
    assert of.mark.is_pending, "two of five"
    assert int(count_of(of.tree, "n1")) == int(before) + 1


async def test_answer_to_another_node_asks_nobody(of: Round) -> None:
    """Nodes without news would answer one another without end."""
    await (await of.mark_of_another()).raise_it(rings=True)
    await let_run()
    rings = of.tree.get(paths.HIGH_WATER)[1].version
    await of.confirm_or_raise()
    assert count_of(of.tree, "n1") == b"1"
    assert of.tree.get(paths.HIGH_WATER)[1].version == rings
    of.inner.calls.clear()
    await of.confirm_or_raise()
    assert of.inner.calls == [], "answered once"


async def test_news_that_come_while_the_mark_is_raised_are_news_afterwards(of: Round) -> None:
    def more() -> None:
        of.verifier.news += 1

    of.verifier.news += 1
    of.inner.before("set", paths.HIGH_WATER, more)
    await of.confirm_or_raise()
    assert of.verifier.has_news


async def test_process_that_another_one_of_its_node_precedes_continues(of: Round) -> None:
    other = of.other.tree.open_session()
    path = paths.high_water("n1")
    for change in (Create(path, b"1"), SetData(path, b"2", -1)):
        of.inner.before("create", path, lambda change=change: of.tree.apply(other, [change]))  # type: ignore[misc]
        of.inner.before("set", path, lambda change=change: of.tree.apply(other, [change]))  # type: ignore[misc]
        of.verifier.news += 1
        if not of.inner.count("create", path):
            await of.other.create(paths.HIGH_WATER)
        await of.confirm_or_raise()
        assert of.verifier.has_news
    assert count_of(of.tree, "n1") == b"2"


class FullDisk(DirectoryDisk):
    def open(self, path: str, *, create: bool = False) -> Any:
        if create:
            raise OSError(ENOSPC, "full")
        return super().open(path, create=create)


async def test_full_disk_ends_no_verification(tree: MemoryTree, tmp_path: Path) -> None:
    of = Round(tree, tmp_path)
    of.verifier = Verifier(of.inner, FullDisk(tmp_path), "n1", of._count)
    await of.started()
    for _ in range(3):
        of.verifier.news += 1
        await of.confirm_or_raise()
    assert count_of(tree, "n1") == b"3"


# ── rounds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def running(tree: MemoryTree, tmp_path: Path) -> AsyncIterator[Round]:
    nursery = TestNursery()
    of = Round(tree, tmp_path)
    await of.verifier.start(nursery)
    yield of
    await nursery.close()


async def test_failed_verification_is_tried_again_soon(running: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only in the next round, for which nobody waits here."""
    monkeypatch.setattr(verifier, "RETRY_S", 0.001)

    def fail() -> None:
        raise MetadataUnavailable("once")

    running.inner.before("get", paths.OLDER_COPY, fail)
    running.inner.blink()
    async with asyncio.timeout(verifier.RAISE_S / 2):
        await wait_until(is_true(lambda: running.verifier.is_open))


async def test_lower_version_is_read_again_each_round(
    tree: MemoryTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server caught up, and no connection broke."""
    monkeypatch.setattr(verifier, "RAISE_S", 0.001)
    nursery = TestNursery()
    of = Round(tree, tmp_path)
    await of.verifier.start(nursery)
    await lower_version(of)
    with pytest.raises(OlderMetadata):
        await of.verifier.judge(LIST)
    await of.other.set(LIST, b"", 0)
    await wait_until(is_true(lambda: of.verifier.is_open))
    await nursery.close()


def is_true(holds: Callable[[], bool]) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def check() -> bool:
        return holds()

    return check


# ── what counts as news ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def store(tree: MemoryTree, tmp_path: Path) -> VerifiedStore:
    store = VerifiedStore(Interleaved(tree), DirectoryDisk(tmp_path), "n1")
    await store.open(Idle())
    return store


async def test_news_are_writes_that_stay_and_newer_versions(store: VerifiedStore, tree: MemoryTree) -> None:
    other = MemoryStore(tree)
    await other.create("/theirs")

    async def news_of(*calls: Coroutine[Any, Any, object]) -> int:
        before = store._verifier.news
        for call in calls:
            await call
        return store._verifier.news - before

    assert await news_of(store.create("/a"), store.create("/b")) == 2
    assert await news_of(store.create("/mine", ephemeral=True)) == 0
    assert await news_of(store.set("/a", b"", 0)) == 1
    assert await news_of(store.multi([Create("/c"), SetData("/a", b"", 1), Create("/d", b"", is_ephemeral(True))])) == 2
    assert await news_of(store.get("/theirs"), store.get("/theirs"), store.children("/"), store.sync("/")) == 0
    await other.set("/theirs", b"", 0)
    assert await news_of(store.get("/theirs"), store.get("/theirs")) == 1
    assert await news_of(store.multi([])) == 0


def is_ephemeral(value: bool) -> bool:
    return value


async def test_write_of_any_version_is_seen_once_it_is_read(store: VerifiedStore) -> None:
    """Only the store knows which version such a write has given to the node."""
    await store.create("/a")
    await store.get("/a")
    await store.multi([SetData("/a", b"", -1)])
    known = store._verifier.seen.highest("/a")
    assert known is not None
    assert known.number == 0


# ── who is notified ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_listeners_hear_of_each_state_once(store: VerifiedStore) -> None:
    states, inner = States(store), store._inner
    assert isinstance(inner, Interleaved)
    inner.suspend()
    await let_run()
    assert states.seen == [SessionState.SUSPENDED]
    inner.resume()
    await let_run()
    assert store.state is SessionState.SUSPENDED
    await store._verifier._verify()
    await store._verifier._verify()
    await let_run()
    assert states.seen == [SessionState.SUSPENDED, SessionState.CONNECTED]


async def test_watch_is_called_once_after_the_verification_if_something_came(store: VerifiedStore) -> None:
    inner, hint, closed = store._inner, Hint(), Hint()
    assert isinstance(inner, Interleaved)
    store.watch("/a", hint)
    watch = store.watch("/a", closed)
    inner.blink()
    await let_run()
    assert hint.calls == 0, "not verified yet"
    await store._verifier._verify()
    watch.close()
    await let_run()
    assert (hint.calls, closed.calls) == (1, 0)
    assert len(store._watches) == 1
    await store._verifier._verify()
    store._reported = SessionState.SUSPENDED
    store._changed()
    await let_run()
    assert hint.calls == 1, "nothing came"
    await MemoryStore(inner.tree).create("/a")
    await let_run()
    assert hint.calls == 2
    [only] = store._watches
    only.report(SessionState.OLDER)
    only.report(SessionState.OLDER)
    await let_run()
    assert hint.calls == 3, "two reports in one turn"
