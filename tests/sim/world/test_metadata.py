"""The simulated metadata store does everything that ZooKeeper may do, and the code on top of it copes with that."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from kvstore.env import Env
from kvstore.env.nursery import TaskNursery
from kvstore.errors import (
    MetadataError,
    MetadataUnavailable,
    MetadataUnknown,
    NodeExists,
    NoSuchNode,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.ephemeral import KeptEphemeral
from kvstore.meta.ledger_ids import LedgerIdGenerator
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import MetadataStore, SessionState, ensure_path
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from tests.meta.drivers import States
from tests.sim.judges.probes import missed
from tests.sim.world.env import SimWorld
from tests.sim.world.metadata import QUIET, MetadataConfig, SimMetadata
from tests.sim.world.metadata_client import SimStore

pytestmark = pytest.mark.sim
T = TypeVar("T")
SEEDS = range(40)


class Scene:
    """A world with a metadata store and nodes that each have an open session."""

    def __init__(self, seed: int, config: MetadataConfig | None = None) -> None:
        self.world = SimWorld(seed)
        self.random = self.world.fork("scene")
        self.metadata = SimMetadata(self.world.loop, self.world.fork("metadata"), config, self.world.trace)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self.world:
            return self.world.run(work)

    async def open(self, name: str) -> SimStore:
        """Return a session of the node `name`, which does nothing on its own."""
        return await self.world.node(name).call(self.metadata.connect())

    async def trouble(self, names: list[str], duration_s: float) -> None:
        """Strike with every fault, and leave none behind."""
        end = self.world.loop.time() + duration_s
        self.metadata.trouble(0.05)
        while self.world.loop.time() < end:
            await asyncio.sleep(self.random.uniform(0.1, 2.0))
            name, kind = self.random.choice(names), self.random.randrange(6)
            length = self.random.choice([0.3, 3.0, 9.0])
            if kind == 0:
                self.metadata.break_connection(name)
            elif kind == 1:
                self.metadata.expire(name)
            elif kind == 2:
                self.metadata.cut(name, silently=self.random.random() < 0.5)
                await asyncio.sleep(length)
                self.metadata.mend(name)
            elif kind == 3:
                self.metadata.stop()
                await asyncio.sleep(length)
                self.metadata.start()
            elif kind == 4:
                self.metadata.freeze()
                await asyncio.sleep(length)
                self.metadata.thaw()
            else:
                self.world.node(name).pause()
                await asyncio.sleep(length)
                self.world.node(name).resume()
        self.metadata.trouble(0)
        await asyncio.sleep(15)


async def session_is(store: SimStore, wanted: SessionState) -> None:
    if store.state is not wanted:
        await States(store).wait_for(wanted, timeout_s=60)


async def tell(store: MetadataStore, path: str) -> bytes | None:
    """Return the current data, retrying as long as necessary, or None if the node does not exist."""
    while True:
        try:
            await store.sync(path)
            return (await store.get(path))[0]
        except NoSuchNode:
            return None
        except (MetadataUnavailable, MetadataUnknown):
            await asyncio.sleep(0.1)


def test_ephemeral_of_crashed_node_outlives_it_until_session_ends() -> None:
    scene = Scene(1, QUIET)

    async def story() -> None:
        await (await scene.open("n1")).create("/e", ephemeral=True)
        watcher = await scene.open("n2")
        scene.world.node("n1").crash()
        await asyncio.sleep(5)
        assert await tell(watcher, "/e") == b""
        await asyncio.sleep(2)
        assert await tell(watcher, "/e") is None

    scene.run(story())


@pytest.mark.parametrize(("cut_s", "is_lost"), [(4.0, False), (8.0, True)])
def test_cut_longer_than_session_ends_it(cut_s: float, is_lost: bool) -> None:
    scene = Scene(2, QUIET)

    async def story() -> None:
        store = await scene.open("n1")
        await store.create("/e", ephemeral=True)
        session, states = store.session, States(store)
        scene.metadata.cut("n1")
        await asyncio.sleep(cut_s)
        assert store.state is SessionState.SUSPENDED
        with pytest.raises(MetadataUnavailable):
            await store.get("/e")
        scene.metadata.mend("n1")
        await session_is(store, SessionState.CONNECTED)
        between = [SessionState.LOST] if is_lost else []
        assert states.seen == [SessionState.SUSPENDED, *between, SessionState.CONNECTED]
        assert (store.session != session) is is_lost
        assert (await tell(store, "/e") is None) is is_lost

    scene.run(story())


def test_paused_node_learns_of_lost_session_when_it_resumes() -> None:
    scene = Scene(3, QUIET)

    async def story() -> None:
        store, watcher = await scene.open("n1"), await scene.open("n2")
        await store.create("/e", ephemeral=True)
        session = store.session
        scene.world.node("n1").pause()
        await asyncio.sleep(8)
        assert await tell(watcher, "/e") is None
        assert (store.state, store.session) == (SessionState.CONNECTED, session)
        scene.world.node("n1").resume()
        await session_is(store, SessionState.SUSPENDED)
        await session_is(store, SessionState.CONNECTED)
        assert store.session != session

    scene.run(story())


def test_outage_of_all_servers_ends_no_session() -> None:
    scene = Scene(4, QUIET)

    async def story() -> None:
        stores = [await scene.open(f"n{number}") for number in range(3)]
        sessions = [store.session for store in stores]
        scene.metadata.stop()
        await asyncio.sleep(60)
        assert {store.state for store in stores} == {SessionState.SUSPENDED}
        scene.metadata.start()
        for store in stores:
            await session_is(store, SessionState.CONNECTED)
        assert [store.session for store in stores] == sessions

    scene.run(story())


def test_frozen_ensemble_is_noticed_and_may_apply_old_writes_much_later() -> None:
    outcomes = set()
    for seed in SEEDS:
        scene = Scene(seed, QUIET)

        async def story(scene: Scene = scene) -> bytes | None:
            store = await scene.open("n1")
            scene.metadata.freeze()
            with pytest.raises(MetadataUnknown):
                await store.create("/late", b"done")
            assert store.state is SessionState.SUSPENDED
            await asyncio.sleep(30)
            scene.metadata.thaw()
            return await tell(store, "/late")

        outcomes.add(scene.run(story()))
    assert outcomes == {None, b"done"}


def test_unknown_write_may_be_done_or_not_but_not_after_client_is_back() -> None:
    outcomes = set()
    for seed in SEEDS:
        scene = Scene(seed, MetadataConfig(break_p=0.5))

        async def story(scene: Scene = scene) -> None:
            store = await scene.open("n1")
            for number in range(20):
                try:
                    await store.create(f"/n{number}")
                except MetadataUnknown:
                    scene.metadata.trouble(0)
                    now = await tell(store, f"/n{number}")
                    await asyncio.sleep(1)
                    assert await tell(store, f"/n{number}") == now
                    outcomes.add(now)
                    scene.metadata.trouble(0.5)
                except MetadataUnavailable:
                    await asyncio.sleep(0.2)

        scene.run(story())
    assert outcomes == {None, b""}


def test_reads_may_be_stale_but_not_after_sync_nor_behind_earlier_read() -> None:
    stale = 0
    for seed in SEEDS:
        scene = Scene(seed, MetadataConfig(slow_p=0))

        async def story(scene: Scene = scene) -> int:
            writer, reader = await scene.open("n1"), await scene.open("n2")
            await writer.create("/a", b"0")
            await reader.sync("/a")
            behind, last = 0, 0
            for version in range(20):
                await writer.set("/a", b"%d" % (version + 1), version)
                assert (await writer.get("/a"))[0] == b"%d" % (version + 1)
                if version % 5 == 4:
                    scene.metadata.break_connection("n2")
                    await asyncio.sleep(0)
                    await tell(reader, "/a")
                seen = int((await reader.get("/a"))[0])
                assert seen >= last
                last, behind = seen, behind + (seen <= version)
                await reader.sync("/a")
                assert int((await reader.get("/a"))[0]) == version + 1
            return behind

        stale += scene.run(story())
    assert stale > 0


def test_every_committed_change_is_shown_to_checkers() -> None:
    scene = Scene(5, QUIET)
    seen: list[tuple[str, bytes | None, bytes | None]] = []

    async def story() -> None:
        store = await scene.open("n1")
        scene.metadata.tree.observers.append(lambda path, old, new: seen.append((path, old, new)))
        await store.create("/a", b"0")
        await store.set("/a", b"1", 0)
        with pytest.raises(VersionConflict):
            await store.set("/a", b"2", 0)
        await store.delete("/a", 1)

    scene.run(story())
    assert seen == [("/a", None, b"0"), ("/a", b"0", b"1"), ("/a", b"1", None)]


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_ephemeral_returns_and_ids_stay_unique_through_all_faults(seed: int) -> None:
    scene = Scene(seed)
    names = ["n1", "n2", "n3"]
    given: list[LedgerId] = []
    created: dict[LedgerId, str] = {}

    async def node(env: Env) -> None:
        store = await scene.metadata.connect()
        assert isinstance(env.nursery, TaskNursery)
        name = env.nursery.name
        kept = KeptEphemeral(store, f"/servers/{name}", is_our_former=name.encode().__eq__)
        kept.start(env.nursery)
        with suppress(MetadataError):
            await kept.publish(name.encode())
        generator, ledgers = LedgerIdGenerator(store), LedgerStore(store)
        while True:
            await asyncio.sleep(env.random.uniform(0, 0.3))
            try:
                ledger = await generator.next_id()
                given.append(ledger)
                await ledgers.create(metadata_of(ledger, env.random.getrandbits(62) + 1))
                assert ledger not in created
                created[ledger] = name
            except (MetadataUnavailable, MetadataUnknown):
                continue
            except NodeExists:
                pytest.fail(f"the id {ledger} was given twice")

    async def story() -> None:
        watcher = await scene.open("watcher")
        await ensure_path(watcher, paths.LEDGERS)
        for name in names:
            scene.world.node(name).start(node)
        await scene.trouble(names, 30)
        await watcher.sync("/servers")
        assert await watcher.children("/servers") == names
        for name in names:
            assert (await watcher.get(f"/servers/{name}"))[1].owner != 0
        before = set(created)
        assert len(before) > 20
        listed = await LedgerStore(watcher).list_ids()
        assert before <= set(listed) <= set(given)
        assert len(set(given)) == len(given)

    scene.run(story())


def metadata_of(ledger: LedgerId, token: int) -> LedgerMetadata:
    ensemble = (BookieId("b1"), BookieId("b2"), BookieId("b3"))
    return LedgerMetadata(ledger, Quorum(3, 3, 2), (Fragment(EntryId(0), ensemble),), token=token)


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_counter_counts_each_known_write_once_through_all_faults(seed: int) -> None:
    scene = Scene(seed)
    names = ["n1", "n2", "n3"]
    known = {"done": 0, "unknown": 0}

    async def node(env: Env) -> None:
        store = await scene.metadata.connect()
        while True:
            await asyncio.sleep(env.random.uniform(0, 0.2))
            try:
                data, stat = await store.get("/count")
                await store.set("/count", b"%d" % (int(data) + 1), stat.version)
                known["done"] += 1
            except (VersionConflict, NoSuchNode):  # the follower may be behind
                continue
            except MetadataUnknown:
                known["unknown"] += 1
            except MetadataUnavailable:
                continue

    async def story() -> None:
        watcher = await scene.open("watcher")
        await watcher.create("/count", b"0")
        for name in names:
            scene.world.node(name).start(node)
        await scene.trouble(names, 30)
        for name in names:
            scene.world.node(name).crash()
        await asyncio.sleep(1)
        count = int(await tell(watcher, "/count") or 0)
        assert known["done"] <= count <= known["done"] + known["unknown"]
        assert known["unknown"] > 0

    scene.run(story())


def test_one_seed_gives_one_sequence_of_events() -> None:
    def digest(seed: int) -> str:
        scene = Scene(seed)

        async def story() -> None:
            store = await scene.open("n1")
            await scene.open("n2")
            await store.create("/a")
            store.watch("/a", lambda: scene.world.trace.event("n1", "watch"))
            await scene.trouble(["n1", "n2"], 10)

        scene.run(story())
        return scene.world.trace.digest()

    assert digest(1) == digest(1) != digest(2)


def test_metadata_tests_have_taken_every_path() -> None:
    assert missed("metadata.") == []
