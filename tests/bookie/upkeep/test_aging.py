"""A bookie's age in the presence of failures: of the metadata store, a disk, or with a copy."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from copy import deepcopy
from typing import Any

import pytest

from kvstore.bookie import Bookie
from kvstore.bookie.age import AGE, age_in, note_age
from kvstore.bookie.directories.spread import SpreadStorage
from kvstore.bookie.upkeep.aging import AGE_S, Aging
from kvstore.errors import MetadataUnknown, NoSuchNode
from kvstore.meta import paths
from kvstore.meta.cookie_store import CookieStore
from kvstore.meta.cookies import Cookie
from kvstore.meta.memory import MemoryTree
from kvstore.meta.store import SetData
from kvstore.proto.bookkeeper import Status
from kvstore.types import BookieId
from tests.bookie.support import crash, in_world, run
from tests.bookie.test_age import JOURNAL, SEVERAL, add, found_by, run_while, started
from tests.meta.drivers import FaultyStore
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

BOOKIE = BookieId("b1-aaaa")
DIRECTORIES = ["disk0", "disk1"]


class Aged:
    """A bookie's aging, one step at a time."""

    def __init__(self, world: SimWorld, tree: MemoryTree) -> None:
        self.tree, self.stored = tree, 0
        self.store = FaultyStore(tree)
        self.cookies = CookieStore(self.store)
        self.env = world.env("b1")
        self.aging = Aging(self.env, self.cookies, BOOKIE, lambda: DIRECTORIES, lambda: self.stored)

    async def format(self) -> None:
        for each in DIRECTORIES:
            self.env.disk.mkdir(each)
            self.env.disk.sync_dir(each)
        self.env.disk.sync_dir("")
        await self.cookies.write(Cookie(bookie=BOOKIE, journal_dirs=("j",), ledger_dirs=("l",), instance_id="i"), None)

    async def store_and_look(self) -> None:
        self.stored += 1
        await self.aging.poll()

    async def ages(self) -> tuple[int, list[int]]:
        return (await self.cookies.age(BOOKIE))[0], [age_in(self.env.disk, each) for each in DIRECTORIES]


def aging(world: SimWorld, work: Callable[[Aged], Coroutine[Any, Any, None]], tree: MemoryTree | None = None) -> None:
    async def scenario() -> None:
        aged = Aged(world, MemoryTree() if tree is None else tree)
        await aged.format()
        await work(aged)

    run(world, scenario())


@pytest.fixture
def tree() -> MemoryTree:
    return MemoryTree()


# docs/protocol.md B34
def test_directories_are_as_old_as_the_metadata_store_says(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        for age in range(1, 4):
            await aged.store_and_look()
            assert await aged.ages() == (age, [age, age])

    aging(world, work)


def test_age_never_falls_in_directories_or_metadata_store(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        await note_age(aged.env.disk, DIRECTORIES[1], 7)
        await aged.store_and_look()
        assert await aged.ages() == (8, [8, 8]), "the store is an older copy of itself"
        again = Aged(world, aged.tree)
        for each in DIRECTORIES:
            await note_age(again.env.disk, each, 3)
        await again.store_and_look()
        assert await again.ages() == (9, [9, 9]), "the directories are"

    aging(world, work)


def test_lost_answer_of_an_age_write_is_not_taken_for_another_process(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        await aged.store_and_look()
        for kind in ("done", "lost"):
            aged.store.faults = [("set", kind)]
            with pytest.raises(MetadataUnknown):
                await aged.store_and_look()
            await aged.store_and_look()
        assert await aged.ages() == (5, [5, 5])
        assert not world.fatals

    aging(world, work)


def test_directories_age_before_the_metadata_store(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(aged: Aged) -> None:
        await aged.store_and_look()
        with monkeypatch.context() as patch:
            patch.setattr(SimDisk, "open", _fails_at(f"{DIRECTORIES[1]}/{AGE}"))
            with pytest.raises(OSError, match="broken"):
                await aged.store_and_look()
        known, there = await aged.ages()
        assert known == 1 == min(there), "no directory is younger than the metadata store says"
        await aged.aging.poll()
        assert await aged.ages() == (3, [3, 3]), "bytes stored then still count"

    aging(world, work)


def _fails_at(broken: str) -> Callable[..., Any]:
    original = SimDisk.open

    def fails(self: SimDisk, path: str, **how: bool) -> Any:
        if path == broken and how.get("create"):
            raise OSError("broken")
        return original(self, path, **how)

    return fails


def test_bytes_stored_during_a_check_count_for_the_next_one(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        original = aged.cookies.age

        async def meanwhile(bookie: BookieId) -> tuple[int, int | None]:
            aged.stored += 1
            return await original(bookie)

        aged.cookies.age = meanwhile  # type: ignore[method-assign]
        await aged.store_and_look()
        aged.cookies.age = original  # type: ignore[method-assign]
        await aged.aging.poll()
        await aged.aging.poll()
        assert await aged.ages() == (2, [2, 2])

    aging(world, work)


def test_removed_bookie_that_continues_leaves_no_age(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        await aged.cookies.delete(BOOKIE, 0)
        with pytest.raises(NoSuchNode):
            await aged.store_and_look()
        assert (await aged.ages())[0] == 0

    aging(world, work)


def test_damaged_age_in_a_directory_counts_as_none(world: SimWorld) -> None:
    async def work(aged: Aged) -> None:
        await aged.store_and_look()
        aged.env.disk.open(f"{DIRECTORIES[0]}/{AGE}").pwrite(18, b"x")
        assert await aged.ages() == (1, [0, 1])

    aging(world, work)


# ── a whole bookie ────────────────────────────────────────────────────────────────────────────────────────────────────


@in_world
async def test_bookie_continues_when_it_cannot_age(
    world: SimWorld, tree: MemoryTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(world, tree) as bookie:
        await add(bookie, 0)
        await pause(1.5 * AGE_S)
        tree.apply(1, [SetData(paths.age(bookie.id), b"\xff", -1)])
        await add(bookie, 1)
        await pause(AGE_S)
        age, disk = age_in(world.node("b1").disk, JOURNAL), world.node("b1").disk
        tree.apply(1, [SetData(paths.age(bookie.id), b"%d" % age, -1)])
        with monkeypatch.context() as patch:
            patch.setattr(SimDisk, "open", _fails_at(f"{JOURNAL}/{AGE}"))
            await pause(AGE_S)
        assert age_in(disk, JOURNAL) == age
        await pause(AGE_S)
        assert age_in(disk, JOURNAL) == (await CookieStore(FaultyStore(tree)).age(bookie.id))[0] == age + 1


@pytest.mark.parametrize("config", [{}, SEVERAL], ids=["one", "several"])
def test_later_metadata_copy_that_returns_raises_no_doubt(
    world: SimWorld, tree: MemoryTree, config: dict[str, object]
) -> None:
    run_while(world, tree, range(1), aged=True, **config)
    older = deepcopy(tree)
    for first in range(1, 4):
        run_while(world, tree, range(first, first + 1), aged=True, **config)
    run_while(world, older, range(4, 5), aged=True, **config)
    assert undoubted(world, tree, **config)


def test_second_copy_younger_than_stored_entries_is_recognized(world: SimWorld, tree: MemoryTree) -> None:
    copies = []

    async def work() -> None:
        async with started(world, tree) as bookie:
            for entry in range(3):
                copies.append(world.node("b1").disk.copy(world.random))
                await add(bookie, entry)
                await pause(1.5 * AGE_S)

    run(world, work())
    crash(world)
    for copy in copies[:2]:
        world.node("b1").disk = copy
        starts = copy.names.now.files[f"{JOURNAL}/STARTS"]
        run_while(world, tree, range(0), aged=True)
        copies[1].names.now.files[f"{JOURNAL}/STARTS"] = starts  # it may have been made after any start
    assert found_by(world, tree, 2) is Status.UNKNOWN_LEDGER_STATE


def test_restored_directory_is_doubted_and_no_other(world: SimWorld, tree: MemoryTree) -> None:
    async def work() -> dict[str, bool]:
        async with started(world, tree, **SEVERAL) as bookie:
            return doubted(bookie)

    run_while(world, tree, range(2), aged=True, **SEVERAL)
    for path in SEVERAL["journal_dirs"]:
        disk = world.node("b1").disk
        disk.overwrite(f"{path}/{AGE}", 0, b"%20d" % 0)
        assert run(world, work()) == {each: each == path for each in SEVERAL["journal_dirs"]}
        crash(world)
        run_while(world, tree, range(2, 4), aged=True, **SEVERAL)
        assert undoubted(world, tree, **SEVERAL)


def test_added_directory_is_as_old_as_the_others(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(2), aged=True)
    run_while(world, tree, range(2, 3), aged=False, **SEVERAL)
    assert undoubted(world, tree, **SEVERAL)


def test_directories_do_not_age_while_one_has_failed(world: SimWorld, tree: MemoryTree) -> None:
    async def work() -> None:
        async with started(world, tree, **SEVERAL) as bookie:
            await add(bookie, 0)
            await pause(1.5 * AGE_S)
            assert isinstance(bookie.storage, SpreadStorage)
            broken = next(each for each in bookie.storage.parts if not each.knows(7))
            bookie.storage._failed(broken, "broken")
            age = age_in(world.node("b1").disk, broken.directory.path)
            await add(bookie, 1)
            await pause(2 * AGE_S)
            assert [age_in(world.node("b1").disk, each) for each in SEVERAL["journal_dirs"]] == [age, age]

    run(world, work())
    crash(world)
    assert undoubted(world, tree, **SEVERAL)


def test_copy_is_doubted_only_until_its_doubt_is_recorded(world: SimWorld, tree: MemoryTree) -> None:
    run_while(world, tree, range(1), aged=False)
    copy = world.node("b1").disk.copy(world.random)
    run_while(world, tree, range(1, 2), aged=False)
    world.node("b1").disk = copy
    assert not undoubted(world, tree)
    assert undoubted(world, tree)


def undoubted(world: SimWorld, tree: MemoryTree, **config: object) -> bool:
    """Return True if the next start doubts no directory; its survey has time to end."""

    async def work() -> bool:
        async with started(world, tree, **config) as bookie:
            found = not any(doubted(bookie).values())
            await pause(1.0)
            return found

    found = run(world, work())
    crash(world)
    return found


def doubted(bookie: Bookie) -> dict[str, bool]:
    storage = bookie.storage
    if isinstance(storage, SpreadStorage):
        return {each.directory.path: each.is_limbo for each in storage.parts}
    return {JOURNAL: storage.inventory.is_limbo}
