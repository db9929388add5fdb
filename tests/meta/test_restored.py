"""Real metadata stores restored to an older copy of themselves while a process uses them, as an operator does it: one
member's data given to all members, or a single server's data put back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from kvstore.devcluster import etcd, zookeeper
from kvstore.env.disk import DirectoryDisk
from kvstore.errors import MetadataError, MetadataLost, MetadataUnavailable, OlderMetadata
from kvstore.meta import paths
from kvstore.meta.connect import connect
from kvstore.meta.history import verifier
from kvstore.meta.history.verified import VerifiedStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore, SessionState
from tests.meta.drivers import TestNursery
from tests.waiting import wait_until

CLUSTER = "7c2d2a3e-0000-4000-8000-000000000002"
LATER = 20
"""Writes after the copy."""


class Restorable(Protocol):
    address: str

    def copy(self, to: Path) -> None:
        """Copy the data of one member, which is stopped for that."""
        ...

    def restore(self, copy: Path) -> None:
        """Put the copy in the place of every member's data, with all of them stopped."""
        ...

    def kill(self) -> None: ...


class Ensemble:
    def __init__(self, directory: Path) -> None:
        self._members = zookeeper.start_ensemble(directory)
        self.address = ",".join(each.address for each in self._members) + "/kvstore"

    def copy(self, to: Path) -> None:
        one = self._members[0]
        one.kill()
        shutil.copytree(one.directory / "data", to)
        self._members[0] = zookeeper.restart(one)
        self._members[0].wait_ready()

    def restore(self, copy: Path) -> None:
        self.kill()
        for place, each in enumerate(self._members):
            shutil.rmtree(each.directory / "data")
            shutil.copytree(copy, each.directory / "data")
            (each.directory / "data" / "myid").write_text(f"{place + 1}\n")
        self._members = [zookeeper.restart(each) for each in self._members]
        for each in self._members:
            each.wait_ready()

    def kill(self) -> None:
        for each in self._members:
            each.kill()


class Server:
    def __init__(self, directory: Path) -> None:
        self._process = etcd.start_standalone(directory)
        self.address = f"etcd://{self._process.address}/kvstore"

    def copy(self, to: Path) -> None:
        self._process.kill()
        shutil.copytree(self._process.directory / "data", to)
        self._process = etcd.restart(self._process)

    def restore(self, copy: Path) -> None:
        self.kill()
        shutil.rmtree(self._process.directory / "data")
        shutil.copytree(copy, self._process.directory / "data")
        self._process = etcd.restart(self._process)

    def kill(self) -> None:
        self._process.kill()


KINDS = [
    pytest.param(Ensemble, marks=pytest.mark.needs_zookeeper, id="zookeeper"),
    pytest.param(Server, marks=pytest.mark.needs_etcd, id="etcd"),
]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restorable]:
    place: Restorable = request.param(tmp_path / "store")
    yield place
    place.kill()


@pytest.fixture
async def nursery() -> AsyncIterator[TestNursery]:
    nursery = TestNursery()
    yield nursery
    await nursery.close()


async def opened(place: Restorable, nursery: TestNursery, directory: Path, node: str) -> VerifiedStore:
    inner = await connect(place.address, timeout_s=60)
    store = VerifiedStore(inner, DirectoryDisk(directory), node)
    try:
        await store.open(nursery)
    except BaseException:
        await inner.close()
        raise
    return store


async def marked(store: VerifiedStore) -> None:
    """Until a high-water mark of all that has happened is confirmed."""

    async def is_marked() -> bool:
        mark = store._verifier.mark
        is_confirmed = mark is not None and mark.confirmed > 0 and not mark.is_pending
        return is_confirmed and not store._verifier.has_news

    await wait_until(is_marked, what="the high-water mark is confirmed")


async def written(store: MetadataStore, path: str, data: bytes) -> None:
    """The same value, over lost connections."""

    async def write() -> bool:
        with suppress(MetadataError):
            await store.set(path, data, -1)
            return True
        return False

    await wait_until(write, what=f"{path} is written")


# docs/protocol.md B29
async def test_restored_older_copy_is_used_by_no_process_and_the_later_one_is(
    place: Restorable, nursery: TestNursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs` goes on through the restore with its session, `starts` comes afterwards with its directory, and `idle`
    has seen nothing since the copy. A process from before the copy would use it: it is told by the others' mark."""
    monkeypatch.setattr(verifier, "RAISE_S", 0.1)
    runs = await opened(place, nursery, tmp_path / "runs", "runs")
    await LayoutStore(runs).initialise(CLUSTER)
    await runs.close()
    runs, starts, idle = [await opened(place, nursery, tmp_path / each, each) for each in ("runs", "starts", "idle")]
    await runs.create("/list", b"0")
    await starts.create("/other", b"0")
    await marked(runs)
    await marked(starts)
    await asyncio.to_thread(place.copy, tmp_path / "older")
    for number in range(LATER):
        await written(runs, "/list", b"%d" % number)
    await written(starts, "/other", b"1")
    await marked(runs)
    await marked(starts)
    later = (await runs.get("/list"))[1]
    await starts.close()
    await asyncio.to_thread(place.copy, tmp_path / "later")

    await asyncio.to_thread(place.restore, tmp_path / "older")
    with pytest.raises(MetadataLost, match="older copy of itself"):
        await opened(place, nursery, tmp_path / "starts", "starts")
    stranger = await connect(place.address, timeout_s=60)
    for number in range(3 * LATER):
        await stranger.set("/other", b"%d" % number, -1)  # so that its revision says nothing any more
    await stranger.close()

    async def is_older() -> bool:
        assert runs.state is not SessionState.CONNECTED
        return runs.state is SessionState.OLDER and idle.state is SessionState.OLDER

    await wait_until(is_older, what="every process refuses the older copy")
    for store in (runs, idle):
        with pytest.raises(OlderMetadata):
            await store.get("/list")
    with pytest.raises(MetadataLost, match="older copy of itself"):
        await opened(place, nursery, tmp_path / "new", "new")

    await asyncio.to_thread(place.restore, tmp_path / "later")
    for store in (runs, idle):

        async def is_used(store: VerifiedStore = store) -> bool:
            with suppress(MetadataUnavailable):
                return (await store.get("/list"))[1].version == later.version
            return False

        await wait_until(is_used, what="the later copy is used")
        assert paths.OLDER_COPY[1:] not in await store.children("/")
        await store.close()
