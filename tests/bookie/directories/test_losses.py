"""A bookie that goes on without a directory: what that may have held is never denied, no fence is forgotten, and it
does not come back (docs/protocol.md, B23)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.bookie.directories.places import MemberState
from kvstore.bookie.upkeep.limbo import settle
from kvstore.errors import ConfigError, MetadataUnavailable
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.directories.support import A, B, C, Naming, Spread, empty, open_spread, place_of
from tests.bookie.support import crash, run
from tests.sim.world.env import SimWorld

LEDGERS = range(1, 13)
FENCED = range(13, 19)
NEVER_HERE, ELSEWHERE = 90, 91


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryTree())


@pytest.fixture
def meta() -> Naming:
    found = Naming()
    for ledger in (*LEDGERS, *FENCED, NEVER_HERE):
        found.create(ledger)
    found.elsewhere(ELSEWHERE)
    return found


class Lives:
    """One bookie, life after life."""

    def __init__(self, world: SimWorld, store: MemoryStore, meta: Naming) -> None:
        self.world, self.store, self.meta = world, store, meta
        self.homes: dict[int, str] = {}

    async def open(self, dirs: tuple[str, ...] = (A, B), lost: tuple[str, ...] = ()) -> Spread:
        return await open_spread(self.world, self.store, self.meta, dirs, lost)

    def written(self, dirs: tuple[str, ...] = (A, B)) -> None:
        """A life in which all ledgers get entries, some a fence; then the power goes."""

        async def life() -> None:
            shelf = await self.open(dirs)
            answers = [shelf.submit(ledger, entry) for ledger in (*LEDGERS, *FENCED) for entry in range(3)]
            assert set(await asyncio.gather(*answers)) == {Status.OK}
            for ledger in FENCED:
                self.meta.create(ledger, LedgerState.IN_RECOVERY)
                assert (await shelf.read(ledger, fence=True))[0] is Status.OK
            self.homes = {ledger: shelf.home(ledger) for ledger in (*LEDGERS, *FENCED)}
            assert {self.homes[each] for each in LEDGERS} == {self.homes[each] for each in FENCED} == set(dirs)

        run(self.world, life())
        crash(self.world)

    def starts(self, dirs: tuple[str, ...] = (A, B), lost: tuple[str, ...] = ()) -> None:
        """A life that ends right after its start."""

        async def life() -> None:
            await self.open(dirs, lost)

        run(self.world, life())
        crash(self.world)

    async def check(self, shelf: Spread, lost: str) -> None:
        """What the lost directory had is neither there nor absent; all else is there."""
        for ledger, home in self.homes.items():
            if home != lost:
                assert await shelf.payload(ledger, 2) == b"hello"
                assert await shelf.status(ledger, 3) is Status.NO_ENTRY
                continue
            assert await shelf.status(ledger, 2) is Status.UNKNOWN_LEDGER_STATE
            assert (await shelf.read_lac(ledger))[0] is Status.UNKNOWN_LEDGER_STATE
            assert (await shelf.read(ledger, 2, fence=True))[0] is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.status(NEVER_HERE, 0) is Status.UNKNOWN_LEDGER_STATE, "it may have been in it"
        assert await shelf.status(ELSEWHERE, 0) is Status.NO_LEDGER
        assert await shelf.status(99, 0) is Status.NO_LEDGER


@pytest.fixture
def lives(world: SimWorld, store: MemoryStore, meta: Naming) -> Lives:
    return Lives(world, store, meta)


# docs/protocol.md B23
@pytest.mark.parametrize("lost", [A, B, C])
def test_lost_directory_contents_are_never_denied(lives: Lives, lost: str) -> None:
    lives.written((A, B, C))
    lives.world.node("b1").disk.die(lost)

    async def life() -> None:
        shelf = await lives.open((A, B, C), (lost,))
        assert shelf.storage.homes.doubted == sorted(
            [*(ledger for ledger, home in lives.homes.items() if home == lost), NEVER_HERE]
        )
        await lives.check(shelf, lost)

    for _ in range(2):
        run(lives.world, life())
        crash(lives.world)


# docs/protocol.md B23
def test_lost_fence_still_holds(lives: Lives) -> None:
    lives.written()
    lives.world.node("b1").disk.die(B)

    async def life() -> None:
        shelf = await lives.open(lost=(B,))
        for ledger in FENCED:
            assert await shelf.add(ledger, 3) is Status.FENCED
        lives.meta.is_away = True
        for ledger in LEDGERS:
            if lives.homes[ledger] == B:
                assert await shelf.add(ledger, 3) is Status.UNKNOWN_LEDGER_STATE, "an admission was lost too"
            else:
                assert await shelf.add(ledger, 3) is Status.OK
        lives.meta.is_away = False
        for ledger in LEDGERS:
            assert await shelf.add(ledger, 3) is Status.OK, "its writer goes on"
            assert await shelf.status(ledger, 4) in (Status.NO_ENTRY, Status.UNKNOWN_LEDGER_STATE)

    run(lives.world, life())


def test_loss_is_on_disk_before_any_answer(lives: Lives) -> None:
    lives.written()
    lives.world.node("b1").disk.die(B)
    lives.meta.fails_listing = True

    async def vain() -> None:
        with pytest.raises(MetadataUnavailable):
            await lives.open(lost=(B,))

    run(lives.world, vain())
    said = place_of(lives.world.node("b1").disk, A)
    assert said is not None
    assert [each.state for each in said.members] == [MemberState.PRESENT, MemberState.LOST]
    lives.meta.fails_listing = False

    async def life() -> None:
        await lives.check(await lives.open(lost=(B,)), B)

    crash(lives.world)
    run(lives.world, life())


def test_lost_directory_never_comes_back(lives: Lives) -> None:
    lives.written()
    lives.starts(lost=(B,))
    with pytest.raises(ConfigError, match=f"{B} is directory 1 of .* which was declared lost"):
        lives.starts()
    crash(lives.world)
    lives.starts((A,))
    lives.starts((A, B), (B,))


def test_empty_disk_replaces_a_lost_directory_as_a_new_one(lives: Lives) -> None:
    lives.written()
    lives.starts(lost=(B,))
    empty(lives.world.node("b1").disk, B)

    async def life(first: int) -> None:
        shelf = await lives.open()
        await lives.check(shelf, B)
        for ledger in range(first, first + 10):
            lives.meta.create(ledger)
            assert await shelf.add(ledger, 0) is Status.OK
        assert {shelf.home(ledger) for ledger in range(first, first + 10)} == {A, B}

    for first in (100, 110):
        run(lives.world, life(first))
        crash(lives.world)
    said = place_of(lives.world.node("b1").disk, B)
    assert said is not None
    assert said.here == 2
    assert [each.state for each in said.members] == [MemberState.PRESENT, MemberState.GONE, MemberState.PRESENT]


def test_first_directory_can_be_lost_and_replaced(lives: Lives) -> None:
    lives.written()
    disk = lives.world.node("b1").disk
    disk.die(A)

    async def life(lost: tuple[str, ...]) -> None:
        await lives.check(await lives.open(lost=lost), A)

    for _ in range(2):
        run(lives.world, life((A,)))
        crash(lives.world)
    disk.exchange(A)
    run(lives.world, life(()))


def test_second_loss_is_survived_by_the_others(lives: Lives) -> None:
    lives.written((A, B, C))
    lives.starts((A, B, C), (B,))

    async def life() -> None:
        shelf = await lives.open((A, B, C), (B, C))
        for ledger, home in lives.homes.items():
            if home == A:
                assert await shelf.payload(ledger, 2) == b"hello"
            else:
                assert await shelf.status(ledger, 2) is Status.UNKNOWN_LEDGER_STATE, "it was noted in C perhaps"

    run(lives.world, life())


def test_loss_of_all_directories_leaves_no_bookie(lives: Lives) -> None:
    lives.written()
    with pytest.raises(ConfigError, match="names every directory"):
        lives.starts(lost=(A, B))
    crash(lives.world)
    empty(lives.world.node("b1").disk, A)
    with pytest.raises(ConfigError, match="nothing is left of a bookie"):
        lives.starts(lost=(B,))


def test_doubt_ends_when_all_entries_were_copied_back(lives: Lives) -> None:
    lives.written()
    lives.world.node("b1").disk.die(B)
    ledger = next(each for each in LEDGERS if lives.homes[each] == B)

    async def life() -> None:
        shelf = await lives.open(lost=(B,))
        lives.meta.create(ledger, LedgerState.CLOSED, 2)
        assert await shelf.entries(ledger) == (Status.OK, []), "so that it is seen what it lacks"
        (part,) = shelf.storage.parts
        for entry in range(3):
            assert ledger not in await settle(part.storage, lives.meta)
            assert await shelf.add(ledger, entry, recovery=True) is Status.OK
        assert ledger in await settle(part.storage, lives.meta)
        assert await shelf.status(ledger, 3) is Status.NO_ENTRY

    run(lives.world, life())


def test_unreadable_directory_is_named_at_start(lives: Lives) -> None:
    lives.written()
    lives.world.node("b1").disk.die(B)
    with pytest.raises(ConfigError, match=f"{B} cannot be read or written.*add it to storage.lost_dirs"):
        lives.starts()


def test_directory_of_another_bookie_is_refused(world: SimWorld, lives: Lives, meta: Naming) -> None:
    lives.written()

    async def other() -> None:
        await open_spread(world, lives.store, Naming(), (A, B), node="b2", name="b2")

    run(world, other(), "b2")
    crash(world, "b2")
    here, there = world.node("b1").disk, world.node("b2").disk
    inode = there.names.now.files[f"{B}/PLACE"]
    here.overwrite(f"{B}/PLACE", 0, inode.cache.read(0, inode.cache.size))
    with pytest.raises(ConfigError, match=r"belongs to bookie b[12]-.*, other directories to b[12]-"):
        lives.starts()
