"""Directories restored from a copy that was made since the bookie's last start are recognized as a copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ENOSPC

import pytest

from kvstore.bookie import Bookie, BookieStorage
from kvstore.bookie.age import age_in, note_age
from kvstore.bookie.identity import _note_start, _starts_in
from kvstore.bookie.upkeep.aging import AGE_S
from kvstore.env import Env
from kvstore.errors import ConfigError
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.layout import LayoutStore
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.meta.store import SetData
from kvstore.meta.transfer import export, restore
from kvstore.proto.bookkeeper import Status
from kvstore.types import EntryId, Fragment, LedgerId, LedgerMetadata, Quorum
from tests.bookie.support import KEY, crash, packet, run, tiny
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = LedgerId(7)
JOURNAL = "bookie/journal"
SEVERAL = {"journal_dirs": (JOURNAL, "disk2/journal")}


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


@asynccontextmanager
async def started(world: SimWorld, tree: MemoryTree, **config: object) -> AsyncIterator[Bookie]:
    store = MemoryStore(tree)
    await LayoutStore(store).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
    async with Bookie(world.env("b1"), tiny(**{"listen": "b1:3181", **config}), store) as bookie:
        if not await LedgerStore(store).list_ids():
            fragment = Fragment(EntryId(0), (bookie.id,))
            await LedgerStore(store).create(LedgerMetadata(L, Quorum(1, 1, 1), (fragment,), token=1))
        yield bookie


async def add(bookie: Bookie, entry: int) -> None:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookie.storage.add(L, entry, packet(L, entry), KEY, recovery=False, done=answer.set_result)
    assert await answer is Status.OK


async def status(bookie: Bookie, entry: int) -> Status:
    answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    bookie.storage.read(L, entry, done=lambda found, *_: answer.set_result(found))
    return await answer


def run_while(world: SimWorld, tree: MemoryTree, entries: range, *, aged: bool, **config: object) -> None:
    """Run the bookie once and let it store; then cut the power."""

    async def work() -> None:
        async with started(world, tree, **config) as bookie:
            for entry in entries:
                await add(bookie, entry)
            if aged:
                await pause(1.5 * AGE_S)

    run(world, work())
    crash(world)


def found_by(world: SimWorld, tree: MemoryTree, entry: int, **config: object) -> Status:
    async def work() -> Status:
        async with started(world, tree, **config) as bookie:
            return await status(bookie, entry)

    return run(world, work())


# docs/protocol.md B34
@pytest.mark.parametrize("config", [{}, SEVERAL], ids=["one", "several"])
def test_copy_of_a_running_bookie_answers_unknown_not_absent(
    world: SimWorld, tree: MemoryTree, config: dict[str, object]
) -> None:
    copies = []

    async def work() -> None:
        async with started(world, tree, **config) as bookie:
            await add(bookie, 0)
            copies.append(world.node("b1").disk.copy(world.random))
            await add(bookie, 1)  # acknowledged
            await pause(1.5 * AGE_S)

    run(world, work())
    crash(world)
    world.node("b1").disk = copies[0]
    assert found_by(world, tree, 1, **config) is Status.UNKNOWN_LEDGER_STATE


@pytest.mark.parametrize("config", [{}, SEVERAL], ids=["one", "several"])
def test_original_directories_are_trusted_after_any_restart(
    world: SimWorld, tree: MemoryTree, config: dict[str, object]
) -> None:
    for first in range(0, 6, 2):
        run_while(world, tree, range(first, first + 2), aged=True, **config)
        assert found_by(world, tree, 99, **config) is Status.NO_ENTRY
        crash(world)


def test_bookie_that_stores_nothing_does_not_age(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(1), aged=True)
    disk, before = world.node("b1").disk, age_in(world.node("b1").disk, JOURNAL)

    async def idle() -> None:
        async with started(world, tree) as bookie:
            await pause(3.5 * AGE_S)  # written by its start
            known = age_in(disk, JOURNAL)
            await pause(4 * AGE_S)
            assert age_in(disk, JOURNAL) == known > before
            assert (await CookieStore(MemoryStore(tree)).age(bookie.id))[0] == known

    run(world, idle())


async def store_alone(world: SimWorld, tree: MemoryTree, seconds: float) -> None:
    """Store an entry, and continue for a while without the metadata store."""
    store = MemoryStore(tree)
    await LayoutStore(store).ensure("8d5e2f52-93a6-4d6c-9a2e-0f5d8a1c3b47")
    async with Bookie(world.env("b1"), tiny(listen="b1:3181"), store) as bookie:
        fragment = Fragment(EntryId(0), (bookie.id,))
        await LedgerStore(store).create(LedgerMetadata(L, Quorum(1, 1, 1), (fragment,), token=1))
        await add(bookie, 0)
        store.suspend()
        await pause(seconds)


def test_metadata_outage_during_aging_costs_nothing(world: SimWorld, tree: MemoryTree) -> None:
    run(world, store_alone(world, tree, 2.5 * AGE_S))
    crash(world)
    assert found_by(world, tree, 99) is Status.NO_ENTRY


def test_decommissioned_bookie_leaves_no_age(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(1), aged=True)
    cookies = CookieStore(MemoryStore(tree))

    async def forget() -> None:
        (bookie,) = await cookies.bookies()
        assert (await cookies.age(bookie))[0] > 0
        _, version = await cookies.read(bookie)
        await cookies.delete(bookie, version)
        assert await cookies.age(bookie) == (0, None)

    run(world, forget())


def test_unreadable_age_is_a_doubt(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(1), aged=True)
    (bookie,) = tree.children(paths.AGES)
    tree.apply(1, [SetData(f"{paths.AGES}/{bookie}", b"\xff\xfe", -1)])
    assert found_by(world, tree, 99) is Status.UNKNOWN_LEDGER_STATE


# docs/protocol.md B7
@pytest.mark.parametrize("name", ["AGE", "STARTS"])
def test_unreadable_disk_is_a_doubt_and_does_not_prevent_a_start(world: SimWorld, tree: MemoryTree, name: str) -> None:
    run_while(world, tree, range(1), aged=True)
    disk = world.node("b1").disk
    disk.fail_reads(f"{JOURNAL}/{name}")
    assert found_by(world, tree, 99) is Status.UNKNOWN_LEDGER_STATE
    disk.fail_reads(f"{JOURNAL}/VERSION")

    async def start() -> None:
        async with started(world, tree):
            pass

    with pytest.raises(ConfigError, match=f"{JOURNAL}/VERSION cannot be read"):
        run(world, start())


# docs/protocol.md B7
def test_damage_behind_the_record_does_not_outlast_the_next_record(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(1), aged=True)
    disk = world.node("b1").disk
    for name in ("AGE", "STARTS"):
        disk.overwrite(f"{JOURNAL}/{name}", 0, b"9 " * 100)

    async def note() -> None:
        await note_age(disk, JOURNAL, 35)

    run(world, note())
    _note_start(disk, JOURNAL, 3, 4)
    assert age_in(disk, JOURNAL) == 35
    assert _starts_in(disk, JOURNAL) == [3, 4]


def test_second_process_on_a_copy_ends_the_first(world: SimWorld, tree: MemoryTree) -> None:
    async def work() -> None:
        async with started(world, tree) as bookie:
            await add(bookie, 0)
            await pause(1.5 * AGE_S)
            cookies = CookieStore(MemoryStore(tree))
            age, version = await cookies.age(bookie.id)
            await cookies.set_age(bookie.id, age + 1, version)  # as the other process does
            await add(bookie, 1)
            await pause(1.5 * AGE_S)

    with pytest.raises(NodeCrashed):
        run(world, work())
    ((_, reason),) = world.fatals
    assert "on a copy of its directories" in reason


def test_copy_started_beside_the_bookie_ends_and_changes_nothing(world: SimWorld, tree: MemoryTree) -> None:
    async def work() -> None:
        async with started(world, tree) as bookie:
            await add(bookie, 0)
            world.node("b2").disk = world.node("b1").disk.copy(world.random)
            with pytest.raises(ConfigError, match=f"one process of bookie {bookie.id}.* got another at b1:3181"):
                await world.node("b2").call(beside(world.env("b2"), tree))
            await add(bookie, 1)

    run(world, work())
    crash(world)
    assert found_by(world, tree, 99) is Status.NO_ENTRY, "its directories are no copy"


async def beside(env: Env, tree: MemoryTree) -> None:
    async with Bookie(env, tiny(listen="b2:3181"), MemoryStore(tree)):
        raise AssertionError("it has started")


# docs/protocol.md B7
@pytest.mark.parametrize("config", [{}, SEVERAL], ids=["one", "several"])
def test_start_that_dies_before_recording_a_doubt_leaves_it_to_the_next(
    world: SimWorld, tree: MemoryTree, config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_while(world, tree, range(1), aged=False, **config)
    copy = world.node("b1").disk.copy(world.random)
    run_while(world, tree, range(1, 2), aged=False, **config)  # acknowledged, and newer than any recorded age
    world.node("b1").disk = copy

    async def has_no_room(*_: object) -> None:
        raise OSError(ENOSPC, "no room")

    async def dies() -> None:
        async with started(world, tree, **config):
            raise AssertionError("it has started")

    with monkeypatch.context() as patch:
        patch.setattr(BookieStorage, "start", has_no_room)
        with pytest.raises(OSError, match="no room"):
            run(world, dies())
    crash(world)
    assert found_by(world, tree, 1, **config) is Status.UNKNOWN_LEDGER_STATE
    crash(world)
    assert found_by(world, tree, 1, **config) is Status.UNKNOWN_LEDGER_STATE, "in the journal by then"


# docs/protocol.md B7, B34
def test_metadata_recreated_from_a_file_raises_no_doubt(world: SimWorld, tree: MemoryTree) -> None:
    """Node versions begin again there, so the directories remember a later start than it counts."""
    for first in range(3):
        run_while(world, tree, range(first, first + 1), aged=True)
    other = MemoryTree()

    async def move() -> None:
        nodes, instance = await export(MemoryStore(tree))
        await restore(MemoryStore(other), nodes, instance)

    run(world, move())
    assert found_by(world, other, 99) is Status.NO_ENTRY


def test_copy_that_is_ten_seconds_old_is_recognized(world: SimWorld, tree: MemoryTree) -> None:
    """docs/protocol.md B34: a minute was long enough to set a machine back to a snapshot."""
    copies = []

    async def work() -> None:
        async with started(world, tree) as bookie:
            await add(bookie, 0)
            copies.append(world.node("b1").disk.copy(world.random))
            await add(bookie, 1)
            await pause(10.0)

    run(world, work())
    crash(world)
    world.node("b1").disk = copies[0]
    assert found_by(world, tree, 1) is Status.UNKNOWN_LEDGER_STATE


def test_aging_failure_is_logged_once(world: SimWorld, tree: MemoryTree, caplog: pytest.LogCaptureFixture) -> None:
    run(world, store_alone(world, tree, 10 * AGE_S))
    assert sum("do not age" in record.getMessage() for record in caplog.records) == 1
