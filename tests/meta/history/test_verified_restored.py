"""Real metadata stores restored to an older copy of themselves while a process uses them, as an operator does it: one
member's data given to all members, or a single server's data put back."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from kvstore.devcluster import etcd, zookeeper
from kvstore.env.disk import DirectoryDisk
from kvstore.errors import MetadataError, MetadataLost, MetadataUnavailable, MetadataUnknown, OlderMetadata
from kvstore.meta import paths
from kvstore.meta.connect import connect
from kvstore.meta.history import verifier
from kvstore.meta.history.verified import VerifiedStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.store import MetadataStore, SessionState, Stat
from tests.meta import ensembles
from tests.meta.drivers import TestNursery
from tests.waiting import PATIENCE_S, wait_until

CLUSTER = "7c2d2a3e-0000-4000-8000-000000000002"
LATER = 20
"""Writes after the copy."""
SETTLED_S = 15.0
"""Time in which the current members elect a leader."""


class Restorable(Protocol):
    address: str

    def copy(self, to: Path) -> None:
        """Copy the data of one member, which is stopped for that."""
        ...

    def restore(self, copy: Path) -> None:
        """Replace every member's data by the copy, with all of them stopped."""
        ...

    def kill(self) -> None: ...


class Ensemble:
    """Three members of ZooKeeper. One member's data is a copy for all."""

    program: ModuleType = zookeeper
    prefix = ""

    def __init__(self, directory: Path) -> None:
        self._members = self.program.start_ensemble(directory)
        self._wait_ready()
        self.address = self.prefix + ",".join(each.address for each in self._members) + "/kvstore"

    def address_of(self, place: int) -> str:
        """The address of one member alone."""
        return f"{self.prefix}{self._members[place].address}/kvstore"

    def copy(self, to: Path) -> None:
        one = self._members[0]
        one.kill()
        shutil.copytree(one.directory / "data", to)
        self.start(0)
        self._wait_ready()

    def keep(self, to: Path) -> None:
        """Copy the data, and leave all members stopped."""
        self.kill()
        shutil.copytree(self._members[0].directory / "data", to)

    def restore(self, copy: Path) -> None:
        self._members = ensembles.restored(self._members, [copy] * len(self._members))

    def set_back(self, place: int, copy: Path) -> None:
        """Replace the data of one member, which is stopped, by the copy."""
        ensembles.set_back(self._members, place, copy)

    def start(self, *places: int) -> None:
        for place in places:
            self._members[place] = self.program.restart(self._members[place])

    def kill(self, *places: int) -> None:
        """Kill these members, or all."""
        for place in places or range(len(self._members)):
            self._members[place].kill()

    def _wait_ready(self) -> None:
        for each in self._members:
            each.wait_ready(PATIENCE_S)


class EtcdEnsemble(Ensemble):
    """Three members of etcd. Each has a copy of its own data, because a data directory holds its member's id."""

    program = etcd
    prefix = "etcd://"

    def copy(self, to: Path) -> None:
        self.keep(to)
        self.start(0, 1, 2)

    def keep(self, to: Path) -> None:
        self._run("--endpoints", self._members[2].address, "get", "/")  # once the last member has everything
        self.kill()
        for place, each in enumerate(self._members):
            shutil.copytree(each.directory / "data", to / f"{place}")

    def restore(self, copy: Path) -> None:
        self.kill()
        for place in range(len(self._members)):
            self.set_back(place, copy)
        self.start(0, 1, 2)
        self._wait_ready()

    def set_back(self, place: int, copy: Path) -> None:
        data = self._members[place].directory / "data"
        shutil.rmtree(data)
        shutil.copytree(copy / f"{place}", data)

    def save(self, file: Path) -> None:
        """Save a snapshot of the store."""
        self._run("--endpoints", self._members[0].address, "snapshot", "save", str(file))

    def restore_snapshot(self, file: Path) -> None:
        """Create all members again from a snapshot, which gives them a new cluster id."""
        self.kill()
        for each in self._members:
            shutil.rmtree(each.directory / "data")
            named = [word for flag in _OF_RESTORE for word in (flag, _last(each.command, flag))]
            self._run("snapshot", "restore", str(file), "--data-dir", str(each.directory / "data"), *named)
        self.start(0, 1, 2)

    def _run(self, *arguments: str) -> None:
        program = etcd.find_etcd().with_name("etcdctl")
        subprocess.run([program, *arguments], check=True, capture_output=True, timeout=60)


_OF_RESTORE = ("--name", "--initial-cluster", "--initial-advertise-peer-urls")


def _last(command: Sequence[str], flag: str) -> str:
    """Return the value of the last flag with this name, which counts."""
    return command[len(command) - list(reversed(command)).index(flag)]


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
    pytest.param(EtcdEnsemble, marks=pytest.mark.needs_etcd, id="etcd of three members"),
]
OF_THREE = [KINDS[0], KINDS[2]]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restorable]:
    place: Restorable = request.param(tmp_path / "store")
    yield place
    place.kill()


@pytest.fixture(params=OF_THREE)
def ensemble(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ensemble]:
    ensemble: Ensemble = request.param(tmp_path / "store")
    yield ensemble
    ensemble.kill()


@pytest.fixture
def etcd_ensemble(tmp_path: Path) -> Iterator[EtcdEnsemble]:
    ensemble = EtcdEnsemble(tmp_path / "store")
    yield ensemble
    ensemble.kill()


@pytest.fixture
async def nursery() -> AsyncIterator[TestNursery]:
    nursery = TestNursery()
    yield nursery
    await nursery.close()


async def opened(
    place: Restorable, nursery: TestNursery, directory: Path, node: str, address: str = ""
) -> VerifiedStore:
    inner = await connect(address or place.address, timeout_s=60)
    store = VerifiedStore(inner, DirectoryDisk(directory), node)
    try:
        await store.open(nursery)
    except BaseException:
        await inner.close()
        raise
    return store


async def marked(store: VerifiedStore) -> None:
    """Wait until a high-water mark of everything that has happened is confirmed."""

    async def is_marked() -> bool:
        mark = store._verifier.mark
        is_confirmed = mark is not None and mark.confirmed > 0 and not mark.is_pending
        return is_confirmed and not store._verifier.has_news

    await wait_until(is_marked, what="the high-water mark is confirmed")


async def written(store: MetadataStore, path: str, data: bytes) -> None:
    """Read the same value, over lost connections."""

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
    """`runs` continues through the restore with its session, `starts` comes afterwards with its directory, and `idle`
    has seen nothing since the copy. A process from before the copy would use it; the mark of the others stops it."""
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
        await stranger.set("/other", b"%d" % number, -1)  # so that its revision proves nothing
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


class Used:
    """A store that two processes have used: `runs` continues, `starts` was stopped at the end. A copy of it was taken
    before the last writes to /list."""

    def __init__(self, runs: VerifiedStore, later: Stat) -> None:
        self.runs = runs
        self.later = later
        """/list as it was last acknowledged."""

    async def check_used(self, store: VerifiedStore, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the store returns /list as it was last acknowledged. Raises TimeoutError."""

        async def is_read() -> bool:
            with suppress(MetadataUnavailable, MetadataUnknown):
                assert (await store.get("/list"))[1].version == self.later.version, "an acknowledged write is denied"
                return True
            return False

        await wait_until(is_read, timeout_s=timeout_s, what="the metadata store is used")


async def used(
    place: Restorable,
    nursery: TestNursery,
    directory: Path,
    copy: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> Used:
    """`copy` makes the copy, at `directory`/older."""
    monkeypatch.setattr(verifier, "RAISE_S", 0.1)
    founder = await opened(place, nursery, directory / "runs", "runs")
    await LayoutStore(founder).initialise(CLUSTER)
    await founder.close()
    runs, starts = [await opened(place, nursery, directory / each, each) for each in ("runs", "starts")]
    await runs.create("/list", b"0")
    await starts.create("/other", b"0")
    await marked(runs)
    await marked(starts)
    await asyncio.to_thread(copy, directory / "older")
    for number in range(LATER):
        await written(runs, "/list", b"%d" % number)
    await written(starts, "/other", b"1")
    await marked(runs)
    await marked(starts)
    await starts.close()
    return Used(runs, (await runs.get("/list"))[1])


# docs/protocol.md B29
async def test_set_back_member_makes_nobody_deny_a_write(
    ensemble: Ensemble, nursery: TestNursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ZooKeeper member that is set back copies from the others. An etcd member that is set back panics, because its
    leader counts on what it had, until another leader is elected."""
    found = await used(ensemble, nursery, tmp_path, ensemble.copy, monkeypatch)
    ensemble.kill(0)
    ensemble.set_back(0, tmp_path / "older")
    ensemble.start(0)
    await found.check_used(found.runs)
    starts = await opened(ensemble, nursery, tmp_path / "starts", "starts")
    await found.check_used(starts)
    await starts.close()
    await asyncio.to_thread(ensemble.kill)
    await asyncio.to_thread(ensemble.start, 0, 1, 2)
    await found.check_used(found.runs)
    starts = await opened(ensemble, nursery, tmp_path / "starts", "starts", ensemble.address_of(0))
    await found.check_used(starts)
    for store in (found.runs, starts):
        await store.close()


# docs/protocol.md B29
async def test_older_copy_of_two_members_is_unused_whenever_the_third_returns(
    ensemble: Ensemble, nursery: TestNursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members that are set back are a majority. The third one has everything. In etcd the terms decide: the others
    catch up, or it panics. In ZooKeeper it does not join, and the older copy stays until a later one is restored."""
    found = await used(ensemble, nursery, tmp_path, ensemble.copy, monkeypatch)
    await asyncio.to_thread(ensemble.keep, tmp_path / "later")
    for place in (0, 1):
        ensemble.set_back(place, tmp_path / "older")
    await asyncio.to_thread(ensemble.start, 0, 1)

    with pytest.raises(MetadataLost, match="older copy of itself"):
        await opened(ensemble, nursery, tmp_path / "starts", "starts")
    with pytest.raises(MetadataError):
        await found.runs.get("/list")
    await asyncio.to_thread(ensemble.start, 2)
    try:
        await found.check_used(found.runs, SETTLED_S)
    except TimeoutError:
        with pytest.raises(MetadataLost, match="older copy of itself"):
            await opened(ensemble, nursery, tmp_path / "starts", "starts")
        await asyncio.to_thread(ensemble.restore, tmp_path / "later")
    await found.check_used(found.runs)
    starts = await opened(ensemble, nursery, tmp_path / "starts", "starts")
    await found.check_used(starts)
    for store in (found.runs, starts):
        await store.close()


# docs/protocol.md B29
@pytest.mark.needs_etcd
async def test_older_snapshot_of_etcd_is_used_by_no_process_and_the_later_one_is(
    etcd_ensemble: EtcdEnsemble, nursery: TestNursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`etcdctl snapshot restore` gives a new cluster id: a process that runs uses neither snapshot until it is
    restarted."""
    found = await used(etcd_ensemble, nursery, tmp_path, etcd_ensemble.save, monkeypatch)
    await asyncio.to_thread(etcd_ensemble.save, tmp_path / "later")

    await asyncio.to_thread(etcd_ensemble.restore_snapshot, tmp_path / "older")
    for node in ("starts", "new"):
        with pytest.raises(MetadataLost, match="older copy of itself"):
            await opened(etcd_ensemble, nursery, tmp_path / node, node)
    with pytest.raises(MetadataUnavailable):
        await found.runs.get("/list")
    await found.runs.close()
    with pytest.raises(MetadataLost, match="older copy of itself"):
        await opened(etcd_ensemble, nursery, tmp_path / "runs", "runs")

    await asyncio.to_thread(etcd_ensemble.restore_snapshot, tmp_path / "later")
    for node in ("runs", "starts"):
        store = await opened(etcd_ensemble, nursery, tmp_path / node, node)
        await found.check_used(store)
        await store.close()
