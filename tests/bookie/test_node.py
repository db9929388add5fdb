"""A whole bookie on a metadata store: it registers last, stays registered, and comes back with the same id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvstore.bookie import Bookie
from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.inventory import Inventory, none_are_ours
from kvstore.env.ports import Nursery
from kvstore.errors import ConfigError, MetadataUnavailable
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.registration import BookieRegistration, RegisteredBookies, RegistrationClient
from kvstore.meta.transfer import export, restore
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId, EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from tests.bookie.support import KEY, crash, given_ids, in_world, packet, run, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = LedgerId(7)


def anyones(_ledger: LedgerId, _key: bytes) -> bool:
    """Return True: every ledger is the cluster's own."""
    return True


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


class Started:
    """A bookie and its session."""

    def __init__(self, bookie: Bookie, store: MemoryStore) -> None:
        self.bookie = bookie
        self.store = store
        self.client = RegistrationClient(store)

    async def add(self, entry: int, payload: bytes = b"hello", ledger: LedgerId = L) -> Status:
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        body = packet(ledger, entry, payload)
        self.bookie.storage.add(ledger, entry, body, KEY, recovery=False, done=answer.set_result)
        return await answer

    async def read(self, entry: int) -> Status:
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.bookie.storage.read(L, entry, done=lambda status, *_: answer.set_result(status))
        return await answer

    async def create_ledger(self, ledger: LedgerId = L) -> None:
        fragment = Fragment(EntryId(0), (self.bookie.id,))
        await LedgerStore(self.store).create(LedgerMetadata(ledger, Quorum(1, 1, 1), (fragment,), token=1))


@asynccontextmanager
async def started(
    world: SimWorld, tree: MemoryTree, is_ours: Callable[[LedgerId, bytes], bool] = anyones, **config: object
) -> AsyncIterator[Started]:
    store = MemoryStore(tree)
    await LayoutStore(store).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
    async with Bookie(world.env("b1"), tiny(**{"listen": "b1:3181", **config}), store, is_ours) as bookie:
        yield Started(bookie, store)


@pytest.mark.parametrize("journal_dirs", [(), ("disk0/journal", "disk1/journal")], ids=["one", "two"])
@in_world
async def test_stored_bytes_are_known_without_counting(
    world: SimWorld, tree: MemoryTree, monkeypatch: pytest.MonkeyPatch, journal_dirs: tuple[str, ...]
) -> None:
    """It is asked every five seconds, and counting all segments takes longer the more is stored."""

    def counted(*_: object) -> None:
        raise AssertionError("all segments were counted")

    async with started(world, tree, journal_dirs=journal_dirs) as one:
        await one.create_ledger()
        before = one.bookie._stored_bytes()
        assert await one.add(0, b"x" * 1000) is Status.OK
        assert one.bookie._stored_bytes() - before >= 1000
        assert one.bookie.storage.refresh_statistics().synced_bytes == one.bookie._stored_bytes()
        monkeypatch.setattr(Inventory, "count", counted)
        one.bookie._stored_bytes()


@in_world
async def test_bookie_registers_its_address_and_unregisters_when_it_stops(world: SimWorld, tree: MemoryTree) -> None:
    async with started(world, tree) as one:
        assert await one.client.bookies() == RegisteredBookies({one.bookie.id: "b1:3181"}, {})
        assert one.bookie.statistics()["new_incarnations"] == 1
    assert await RegistrationClient(MemoryStore(tree)).bookies() == RegisteredBookies({}, {})


@in_world
async def test_advertised_address_is_announced_to_others(world: SimWorld, tree: MemoryTree) -> None:
    async with started(world, tree, advertise="outside:9999") as one:
        assert (await one.client.bookies()).writable == {one.bookie.id: "outside:9999"}


def test_bookie_comes_back_with_the_same_id_after_a_crash(world: SimWorld, tree: MemoryTree) -> None:
    ids: list[BookieId] = []

    async def first() -> None:
        async with started(world, tree) as one:
            ids.append(one.bookie.id)
            await one.create_ledger()
            assert await one.add(0) is Status.OK
            world.node("b1").crash(power=True)

    async def second() -> None:
        async with started(world, tree) as one:
            assert one.bookie.id == ids[0]
            assert one.bookie.statistics()["new_incarnations"] == 0
            assert await one.add(1) is Status.OK
            assert (await one.client.bookies()).writable == {ids[0]: "b1:3181"}

    with pytest.raises(NodeCrashed):
        run(world, first())
    run(world, second())


# docs/protocol.md B11
@in_world
async def test_bookie_registers_again_after_a_lost_session(world: SimWorld, tree: MemoryTree) -> None:
    async with started(world, tree) as one:
        await one.create_ledger()
        assert await one.add(0) is Status.OK
        one.store.suspend()
        assert await one.add(1) is Status.OK
        one.store.expire()
        assert await RegistrationClient(MemoryStore(tree)).bookies() == RegisteredBookies({}, {})
        assert await one.add(2) is Status.OK
        one.store.resume()
        await pause(15)
        assert await one.client.bookies() == RegisteredBookies({one.bookie.id: "b1:3181"}, {})


async def filled(world: SimWorld, one: Started) -> SimDisk:
    """Leave little free space, and add entries until the bookie refuses one. Return its disk."""
    disk = world.node("b1").disk
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + 5 * 4096)
    entry = 0
    while await one.add(entry, b"x" * 300) is Status.OK:
        entry += 1
    return disk


@in_world
async def test_full_disk_changes_the_registration_and_is_logged_once(
    world: SimWorld, tree: MemoryTree, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(world, tree) as one:
        await one.create_ledger()
        disk = await filled(world, one)
        await pause(1)
        assert await one.client.bookies() == RegisteredBookies({}, {one.bookie.id: "b1:3181"})
        await pause(20)
        assert caplog.text.count("cannot be created, retrying") == 1, "not at each check"
        disk.set_capacity(1 << 30)
        await pause(5)
        assert await one.client.bookies() == RegisteredBookies({one.bookie.id: "b1:3181"}, {})


@in_world
async def test_disk_that_others_have_filled_is_logged_once(
    world: SimWorld, tree: MemoryTree, caplog: pytest.LogCaptureFixture
) -> None:
    """The reserve is used up, too: the segment ahead and the reserve have checks of their own, with different texts."""
    async with started(world, tree, reserve_bytes=1 << 20) as one:
        await one.create_ledger()
        await filled(world, one)
        await pause(20)
        assert await one.client.bookies() == RegisteredBookies({}, {one.bookie.id: "b1:3181"})
        assert caplog.text.count("cannot be created, retrying") == 1, "not at each check"


def test_bookie_that_must_not_start_registers_nowhere(world: SimWorld, tree: MemoryTree) -> None:
    async def first() -> None:
        async with started(world, tree):
            pass

    async def second() -> None:
        async with started(world, tree, name="b2"):
            pass

    run(world, first())
    crash(world)
    with pytest.raises(ConfigError, match="expected b2"):
        run(world, second())
    assert tree.children("/ledgers/available") == ["readonly"]


async def refuse_a_start(world: SimWorld, tree: MemoryTree) -> None:
    """The metadata store goes away when the journal is already open; the node then starts again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetadataAuthority, "metadata", _away)
        with pytest.raises(MetadataUnavailable):
            async with started(world, tree):
                pass


async def _away(_: MetadataAuthority, _ledger: LedgerId) -> LedgerMetadata:
    raise MetadataUnavailable("not connected")


# docs/protocol.md B35
def test_failed_start_leaves_no_writer_behind(world: SimWorld, tree: MemoryTree) -> None:
    """On a full disk, the first journal would keep trying to create the segment that the second one creates."""

    async def first() -> None:
        async with started(world, tree) as one:
            await one.create_ledger()
            assert await one.add(0) is Status.OK

    async def second() -> None:
        disk = world.node("b1").disk
        disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + 6000)
        await refuse_a_start(world, tree)
        disk.set_capacity(1 << 30)
        async with started(world, tree) as one:
            assert await one.add(1) is Status.OK
            await pause(3)
            assert await one.add(2) is Status.OK
            world.node("b1").crash(power=True)

    async def third() -> None:
        async with started(world, tree) as one:
            assert [await one.read(entry) for entry in range(3)] == [Status.OK] * 3

    run(world, first())
    crash(world)
    with pytest.raises(NodeCrashed):
        run(world, second())
    run(world, third())


# docs/protocol.md A10
@in_world
async def test_bookie_removed_while_it_starts_does_not_serve(world: SimWorld, tree: MemoryTree) -> None:
    """The operator's command checked the registration before the bookie registered, and does not check again."""
    register = BookieRegistration.start

    async def late(self: BookieRegistration, nursery: Nursery, *, readonly: bool = False) -> None:
        cookies = CookieStore(MemoryStore(tree))
        for bookie in await cookies.bookies():
            await cookies.delete(bookie, (await cookies.read(bookie))[1])
        await register(self, nursery, readonly=readonly)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BookieRegistration, "start", late)
        with pytest.raises(ConfigError, match="was removed while it started"):
            async with started(world, tree):
                pass
    assert tree.children("/ledgers/available") == ["readonly"]


# docs/protocol.md B10, B29
@in_world
async def test_deleted_ledgers_are_dropped_automatically(world: SimWorld, tree: MemoryTree) -> None:
    async with started(world, tree, none_are_ours, reclaim_interval_s=30.0) as one:
        await one.create_ledger()
        assert await one.add(0) is Status.OK
        await LedgerStore(one.store).remove(L, -1)
        await pause(31)
        assert one.bookie.statistics()["dropped_ledgers"] == 0, "its id was never given: B29"
        assert paths.OLDER_COPY not in tree.paths(), "its creator may have chosen it"
        assert one.bookie.statistics()["unassigned_ledgers"] == 1
        await given_ids(one.store, L)
        await pause(31)
        assert one.bookie.statistics()["dropped_ledgers"] == 1
        assert await one.add(1) is Status.FENCED


# docs/protocol.md B29
@in_world
async def test_running_bookie_marks_an_older_metadata_copy_in_time(world: SimWorld, tree: MemoryTree) -> None:
    async with started(world, tree, reclaim_interval_s=30.0) as one:
        await one.create_ledger()
        assert await one.add(0) is Status.OK
        await LedgerStore(one.store).remove(L, -1)
        await pause(30 * (L + 3))
        assert one.bookie.statistics()["dropped_ledgers"] == 0
        assert paths.OLDER_COPY in tree.paths()
        assert await one.read(0) is Status.OK


# docs/protocol.md B29
@pytest.mark.parametrize("is_given", [False, True])
def test_bookie_does_not_start_with_ledger_ids_not_yet_given(world: SimWorld, tree: MemoryTree, is_given: bool) -> None:
    async def first() -> None:
        async with started(world, tree) as one:
            await one.create_ledger()
            assert await one.add(0) is Status.OK
            await LedgerStore(one.store).remove(L, -1)
            if is_given:
                await given_ids(one.store, L)

    async def second() -> None:
        async with started(world, tree):
            pass

    run(world, first())
    crash(world)
    if is_given:
        run(world, second())
        return
    with pytest.raises(ConfigError, match=rf"an older copy of itself: .* does not know 1 ledgers .*\({L}\)"):
        run(world, second())
    assert tree.children("/ledgers/available") == ["readonly"]


# docs/protocol.md B29
@in_world
async def test_bookie_does_not_start_on_metadata_that_was_moved_away(world: SimWorld, tree: MemoryTree) -> None:
    """Ledgers created since then have ids of a range that was never counted there."""
    moved = LedgerId((1 << 32) + 5)
    async with started(world, tree) as one:
        await one.create_ledger(moved)
        assert await one.add(0, ledger=moved) is Status.OK
        await LedgerStore(one.store).remove(moved, -1)
    await given_ids(MemoryStore(tree), LedgerId(30))
    with pytest.raises(ConfigError, match=rf"an older copy of itself: .* does not know 1 ledgers .*\({moved}\)"):
        async with started(world, tree):
            pass


# docs/protocol.md B29, B10
@pytest.mark.parametrize("tells", [True, False])
@in_world
async def test_incomplete_exported_metadata_makes_a_bookie_drop_nothing(
    world: SimWorld, tree: MemoryTree, tells: bool
) -> None:
    """Restored from a file that was written before the ledger was created. If the file contains the id counter, the
    bookie does not start; a file of an older release does not."""
    moved = MemoryTree()
    async with started(world, tree):
        pass
    await given_ids(MemoryStore(tree), LedgerId(L - 1))
    nodes, instance = await export(MemoryStore(tree))
    async with started(world, tree) as one:
        await one.create_ledger()
        assert await one.add(0) is Status.OK
    if not tells:
        del nodes[paths.COUNTED]
    await restore(MemoryStore(moved), nodes, instance)
    if tells:
        with pytest.raises(ConfigError, match=rf"an older copy of itself: .* does not know 1 ledgers .*\({L}\)"):
            async with started(world, moved):
                pass
        assert paths.OLDER_COPY in moved.paths()
        return
    async with started(world, moved, reclaim_interval_s=30.0) as one:
        await pause(31)
        assert (one.bookie.statistics()["unassigned_ledgers"], await one.read(0)) == (1, Status.OK)


# docs/protocol.md B29
def test_id_chosen_by_its_creator_proves_nothing_while_known(world: SimWorld, tree: MemoryTree) -> None:
    async def first() -> None:
        async with started(world, tree) as one:
            await one.create_ledger()
            assert await one.add(0) is Status.OK

    async def second() -> None:
        async with started(world, tree):
            pass

    run(world, first())
    crash(world)
    run(world, second())
