"""A bookie with several directories: where its ledgers are, that they stay there, and that clients see a single
bookie."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.bookie.directories.spread import SpreadStorage
from kvstore.bookie.storage import BookieStorage
from kvstore.errors import ConfigError
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import master_key
from kvstore.types import LedgerState
from tests.bookie.directories.support import A, B, C, Naming, Spread, empty, open_spread, place_of
from tests.bookie.support import KEY, crash, in_world, metadata, packet, run
from tests.sim.world.env import SimWorld

LEDGERS = range(1, 25)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryTree())


@pytest.fixture
def meta() -> Naming:
    found = Naming()
    for ledger in LEDGERS:
        found.create(ledger)
    return found


async def fill(shelf: Spread, ledgers: range = LEDGERS, count: int = 3, first: int = 0) -> None:
    answers = [shelf.submit(ledger, entry) for ledger in ledgers for entry in range(first, first + count)]
    assert set(await asyncio.gather(*answers)) == {Status.OK}


def test_ledgers_are_spread_and_stay_in_their_directory(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    homes: dict[int, str] = {}

    async def first() -> None:
        shelf = await open_spread(world, store, meta, (A, B, C))
        await fill(shelf)
        homes.update({ledger: shelf.home(ledger) for ledger in LEDGERS})
        assert set(homes.values()) == {A, B, C}

    async def later(dirs: tuple[str, ...]) -> None:
        shelf = await open_spread(world, store, meta, dirs)
        assert {ledger: shelf.home(ledger) for ledger in LEDGERS} == homes
        for ledger in LEDGERS:
            assert await shelf.payload(ledger, 2) == b"hello"
            assert await shelf.status(ledger, 3) is Status.NO_ENTRY
            assert await shelf.add(ledger, 2) is Status.OK
        assert await shelf.status(99, 0) is Status.NO_LEDGER
        assert shelf.storage.homes.doubted == []

    run(world, first())
    for dirs in ((A, B, C), (C, A, B)):
        crash(world)
        run(world, later(dirs))


def test_one_directory_is_a_plain_storage_with_the_usual_files(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    async def scenario() -> None:
        shelf = await open_spread(world, store, meta, (A,))
        assert type(shelf.storage) is BookieStorage
        await fill(shelf)

    run(world, scenario())
    names = world.node("b1").disk.names.now.files
    assert place_of(world.node("b1").disk, A) is None
    assert {path.rpartition("/")[2] for path in names if not path.endswith((".journal", ".index", ".files"))} == {
        "STARTS", "VERSION",
    }  # fmt: skip


def test_bookie_with_one_directory_can_get_more(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    ids = []

    async def before() -> None:
        shelf = await open_spread(world, store, meta, (A,))
        ids.append(shelf.storage.bookie)
        await fill(shelf, range(1, 9))

    async def after() -> None:
        shelf = await open_spread(world, store, meta, (A, B))
        ids.append(shelf.storage.bookie)
        await fill(shelf)
        assert {shelf.home(ledger) for ledger in range(1, 9)} == {A}, "old ledgers stay in the first"
        assert {shelf.home(ledger) for ledger in range(9, 25)} == {A, B}
        assert shelf.storage.homes.doubted == []

    run(world, before())
    crash(world)
    run(world, after())
    assert ids[0] == ids[1]


@in_world
async def test_larger_disk_gets_more_ledgers_and_a_full_one_none(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    shelf = await open_spread(world, store, meta, (A, B))
    first, second = shelf.storage.parts
    second.storage.free_bytes = lambda: 3 * first.storage.free_bytes()
    counts = {A: 0, B: 0}
    for ledger in range(1000, 2000):
        counts[shelf.storage.homes.chosen(ledger).directory.path] += 1
    assert 200 < counts[A] < 300
    second.storage.journal.is_full = True
    assert {shelf.storage.homes.chosen(ledger) for ledger in range(1000, 1100)} == {first}
    assert not shelf.storage.is_readonly


@in_world
async def test_requests_waiting_for_metadata_follow_the_first_one(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    shelf = await open_spread(world, store, meta, (A, B))
    meta.gate = asyncio.Event()
    add = shelf.submit(1, 0)
    home = shelf.storage.homes.hold(1, lambda: None)[0]
    other = next(each for each in shelf.storage.parts if each is not home)
    other.storage.free_bytes = lambda: 1 << 60  # by now it would be chosen
    fence = shelf.submit_read(1, fence=True)
    meta.gate.set()
    await add
    assert (await fence)[0] in (Status.OK, Status.NO_ENTRY)
    assert shelf.home(1) == home.directory.path
    assert await shelf.add(1, 1) is Status.FENCED


def test_fences_tombstones_and_lacs_are_found_in_any_directory(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    async def first() -> None:
        shelf = await open_spread(world, store, meta)
        await fill(shelf)
        for ledger in LEDGERS:
            assert await shelf.write_lac(ledger, 2) is Status.OK
            await shelf.read(ledger, fence=True)

    async def second() -> None:
        shelf = await open_spread(world, store, meta)
        for ledger in LEDGERS:
            assert await shelf.add(ledger, 3) is Status.FENCED
            assert (await shelf.read_lac(ledger))[1] is not None
            assert await shelf.entries(ledger) == (Status.OK, [(0, 3)])
            assert await shelf.status(ledger, 0, fence=True, key=master_key(b"stranger")) is Status.UNAUTHORIZED

    run(world, first())
    crash(world)
    run(world, second())


def test_missing_directory_is_named(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    async def first() -> None:
        await fill(await open_spread(world, store, meta, (A, B)))

    async def again(dirs: tuple[str, ...]) -> None:
        await open_spread(world, store, meta, dirs)

    run(world, first())
    crash(world)
    with pytest.raises(ConfigError, match=rf"directory 1 of this bookie, {B}, is missing or empty.*storage.lost_dirs"):
        run(world, again((A,)))
    crash(world)
    empty(world.node("b1").disk, B)
    with pytest.raises(ConfigError, match=rf"directory 1 of this bookie, {B}, is missing or empty.*storage.lost_dirs"):
        run(world, again((A, B)))


def test_start_without_space_for_a_segment_says_so(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    async def again() -> None:
        await open_spread(world, store, meta)

    async def first() -> None:
        await fill(await open_spread(world, store, meta))

    def start_on_a_full_disk() -> None:
        for _ in range(20):
            disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes())
            run(world, again())
            crash(world)

    run(world, first())
    crash(world)
    disk = world.node("b1").disk
    with pytest.raises(OSError, match="no space left"):  # once no former segment has space to release
        start_on_a_full_disk()


def test_directory_restored_from_a_copy_is_doubted(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    homes: dict[int, str] = {}

    async def first() -> None:
        shelf = await open_spread(world, store, meta)
        await fill(shelf)
        homes.update({ledger: shelf.home(ledger) for ledger in LEDGERS})

    async def again() -> None:
        await open_spread(world, store, meta)

    async def restored() -> None:
        shelf = await open_spread(world, store, meta)
        for ledger, home in homes.items():
            expected = Status.UNKNOWN_LEDGER_STATE if home == B else Status.NO_ENTRY
            assert await shelf.status(ledger, 9) is expected
        assert await shelf.status(99, 0) is Status.UNKNOWN_LEDGER_STATE, "B may have had it"

    run(world, first())
    crash(world)
    disk = world.node("b1").disk
    starts = disk.names.now.files[f"{B}/STARTS"].copy()
    run(world, again())
    crash(world)
    disk.overwrite(f"{B}/STARTS", 0, starts.cache.read(0, starts.cache.size))
    for _ in range(2):
        run(world, again())
        crash(world)
        disk.overwrite(f"{B}/STARTS", 0, starts.cache.read(0, starts.cache.size))
    run(world, restored())


@in_world
async def test_statistics_and_space_are_sums_over_directories(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    shelf = await open_spread(world, store, meta)
    await fill(shelf)
    assert isinstance(shelf.storage, SpreadStorage)
    found = shelf.storage.refresh_statistics()
    assert (found.adds, found.ledgers, found.directories, found.directories_failed) == (72, 24, 2, 0)
    assert found.group_records.count == found.syncs > 2
    assert not found.readonly
    total, free = shelf.storage.space()
    assert total > free > 0


@in_world
async def test_raw_adds_of_a_ledger_go_to_one_directory(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    shelf = await open_spread(world, store, meta, admit_raw_adds=True)
    assert shelf.storage.raw.is_on
    for ledger in range(100, 110):
        meta.known[ledger] = replace(metadata(ledger, state=LedgerState.CLOSED), password=bytes(20))
        for entry in range(2):
            answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
            shelf.storage.raw.add(ledger, entry, packet(ledger, entry), KEY, done=answer.set_result)
            assert await answer is Status.OK
    assert {shelf.home(ledger) for ledger in range(100, 110)} == {A, B}


@in_world
async def test_metadata_of_a_closed_ledger_is_read_once_for_all_directories(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    """The directories share one admission, so each question is asked once and counted once."""
    shelf = await open_spread(world, store, meta)
    meta.create(1, LedgerState.CLOSED, 3)
    assert await shelf.add(1, 0) is Status.FENCED
    assert shelf.storage.refresh_statistics().asked_metadata == 1
