"""A directory whose disk fails while the bookie runs: no other directory fails (docs/protocol.md, B24)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.bookie.directories.spread import SpreadStorage
from kvstore.bookie.directories.upkeep import start_upkeep
from kvstore.bookie.inventory import none_are_ours
from kvstore.meta.memory import MemoryStore, MemoryTree
from kvstore.proto.bookkeeper import LAST_ENTRY, Status
from kvstore.types import LedgerState
from tests.bookie.directories.support import A, B, Naming, Spread, open_spread
from tests.bookie.support import KEY, crash, in_world, packet, run, tiny
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

LEDGERS = range(1, 21)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(MemoryTree())


@pytest.fixture
def meta() -> Naming:
    found = Naming()
    for ledger in range(1, 200):
        found.create(ledger)
    return found


async def filled(world: SimWorld, store: MemoryStore, meta: Naming) -> Spread:
    shelf = await open_spread(world, store, meta)
    answers = [shelf.submit(ledger, entry) for ledger in LEDGERS for entry in range(3)]
    assert set(await asyncio.gather(*answers)) == {Status.OK}
    return shelf


async def lose(world: SimWorld, shelf: Spread, path: str = B) -> list[int]:
    """Break the disk at `path`, and let the next add find out. Return the ledgers that are there."""
    there = shelf.in_directory(path, LEDGERS)
    world.node("b1").disk.die(path)
    assert await shelf.add(there[0], 3) is Status.IO_ERROR
    return there


# docs/protocol.md B24
@in_world
async def test_failed_directory_refuses_its_ledgers_while_others_continue(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    shelf = await filled(world, store, meta)
    gone = await lose(world, shelf)
    for ledger in LEDGERS:
        if ledger not in gone:
            assert await shelf.add(ledger, 3) is Status.OK
            assert await shelf.payload(ledger, 3) == b"hello"
            continue
        assert await shelf.add(ledger, 3) is Status.IO_ERROR
        assert await shelf.add(ledger, 3, recovery=True) is Status.IO_ERROR
        assert await shelf.write_lac(ledger, 3) is Status.IO_ERROR
        for entry in (0, 9, LAST_ENTRY):
            assert await shelf.status(ledger, entry) is Status.UNKNOWN_LEDGER_STATE
            assert await shelf.status(ledger, entry, fence=True) is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.read_lac(ledger))[0] is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.entries(ledger))[0] is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.poll(ledger, -1))[0] is Status.UNKNOWN_LEDGER_STATE
        assert shelf.storage.listen(ledger, None) is None
    found = shelf.storage.refresh_statistics()
    assert (found.directories, found.directories_failed) == (2, 1)


@in_world
async def test_failed_directory_is_reported_with_its_reason(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    shelf = await filled(world, store, meta)
    assert isinstance(shelf.storage, SpreadStorage)
    assert [(each.failure, each.readonly) for each in shelf.storage.directories()] == [("", False)] * 2
    await lose(world, shelf)
    failed = [each for each in shelf.storage.directories() if each.failure]
    assert len(failed) == 1
    part = next(each for each in shelf.storage.parts if each.reason)
    assert (failed[0].path, failed[0].failure) == (part.directory.path, part.reason)
    assert [each.free_bytes > 0 for each in shelf.storage.directories() if not each.failure] == [True]


@in_world
async def test_free_space_of_a_failed_directory_does_not_count(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    """Its file system may still say how much is free, or may hang when it is asked."""
    shelf = await filled(world, store, meta)
    await pause(1)
    disk = world.node("b1").disk
    disk.fail_sync()
    assert await shelf.add(shelf.in_directory(B, LEDGERS)[0], 3) is Status.IO_ERROR
    asked, free_bytes = [], disk.free_bytes

    def asking(path: str = "") -> int:
        asked.append(path)
        return free_bytes(path)

    disk.free_bytes = asking  # type: ignore[method-assign]
    (failed,) = (each for each in shelf.storage.directories() if each.failure)
    assert (failed.path, failed.free_bytes) == (B, 0)
    assert shelf.storage.refresh_statistics().free_bytes == shelf.storage.space()[1]
    assert set(asked) == {A}


@in_world
async def test_new_ledgers_avoid_a_failed_directory(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    shelf = await filled(world, store, meta)
    await lose(world, shelf)
    for ledger in range(100, 130):
        assert await shelf.status(ledger, 0) is Status.NO_LEDGER
        assert await shelf.add(ledger, 0) is Status.OK
        assert shelf.home(ledger) == A


# docs/protocol.md B7, B24
@pytest.mark.parametrize("when", ["before its upkeep", "during its survey"])
@in_world
async def test_new_ledgers_avoid_a_directory_that_failed_in_limbo(
    world: SimWorld, store: MemoryStore, meta: Naming, when: str
) -> None:
    """The directory may have lost records of ledgers that were made before, so these stay unknown."""
    shelf = await filled(world, store, meta)
    assert isinstance(shelf.storage, SpreadStorage)
    (part,) = (each for each in shelf.storage.parts if each.directory.path == B)
    part.storage.inventory.set_limbo(True)
    meta.fails_listing = True
    if when == "before its upkeep":
        await lose(world, shelf)
    start_upkeep(shelf.env, tiny(), shelf.storage, meta, none_are_ours, shelf.env.nursery)
    await pause(1)
    if when == "during its survey":
        await lose(world, shelf)
    meta.create(300)
    assert await shelf.add(300, 0) is Status.IO_ERROR, "no list says yet that the ledger was made later"
    meta.fails_listing = False
    await pause(10)
    for ledger in (*range(30, 50), 300):
        assert await shelf.add(ledger, 0) is Status.IO_ERROR
        assert await shelf.status(ledger, 0, fence=True) is Status.UNKNOWN_LEDGER_STATE
    for ledger in range(500, 520):
        meta.create(ledger)
        assert await shelf.status(ledger, 0) is Status.NO_LEDGER
        assert await shelf.add(ledger, 0) is Status.OK
        assert shelf.home(ledger) == A


@pytest.mark.parametrize("how", ["write", "sync"])
@in_world
async def test_requests_waiting_for_a_failed_directory_are_answered(
    world: SimWorld, store: MemoryStore, meta: Naming, how: str
) -> None:
    """Nothing is acknowledged, and nobody waits forever: an unanswered request would use up its connection."""
    shelf = await filled(world, store, meta)
    disk = world.node("b1").disk
    (one, two, three, *_), kept = shelf.in_directory(B, LEDGERS), shelf.in_directory(A, LEDGERS)[0]
    poll = shelf.poll(three, 5, 60_000)
    if how == "write":
        disk.die(B)
    adds = [shelf.submit(one, entry) for entry in (3, 4, 5, 3)]  # the last one repeats a packet that waits for its sync
    fence, lac = shelf.submit_read(two, fence=True), asyncio.ensure_future(shelf.write_lac(three, 1))
    forced: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
    shelf.storage.force(one, done=forced.set_result)
    meta.gate = asyncio.Event()
    await asyncio.sleep(0)
    disk.die(B)
    async with asyncio.timeout(5):
        assert set(await asyncio.gather(*adds)) == {Status.IO_ERROR}
        assert (await fence)[0] is Status.UNKNOWN_LEDGER_STATE
        assert (await poll)[0] is Status.UNKNOWN_LEDGER_STATE
        assert await lac is Status.IO_ERROR
        assert await forced is Status.IO_ERROR
        assert await shelf.add(kept, 3) is Status.OK
    assert not shelf.storage.sync_gate.is_shut
    meta.gate.set()


@in_world
async def test_client_error_does_not_keep_others_from_their_answers(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    def fail(_status: Status) -> None:
        raise ConnectionError("it is gone")

    shelf = await filled(world, store, meta)
    one, two, *_ = shelf.in_directory(B, LEDGERS)
    failed = []
    shelf.storage.on_failed(failed.append)
    poll = shelf.poll(two, 5, 60_000)
    world.node("b1").disk.die(B)
    shelf.storage.add(one, 3, packet(one, 3), KEY, recovery=False, done=fail)
    add = shelf.submit(one, 4)
    shelf.storage.sync_gate.shut(shelf.storage.homes.asked(one).storage.adds)
    async with asyncio.timeout(5):
        assert await add is Status.IO_ERROR
        assert (await poll)[0] is Status.UNKNOWN_LEDGER_STATE
    await asyncio.sleep(0)
    assert not shelf.storage.sync_gate.is_shut
    assert [part.directory.path for part in failed] == [B]


@in_world
async def test_request_waiting_for_metadata_is_answered_when_a_directory_fails(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    shelf = await filled(world, store, meta)
    meta.gate = asyncio.Event()
    waiting = {}
    for ledger in range(100, 120):
        home = shelf.storage.homes.chosen(ledger).directory.path
        waiting[ledger] = home, shelf.submit(ledger, 0), shelf.submit_read(ledger, fence=True)
    assert {home for home, _, _ in waiting.values()} == {A, B}
    await lose(world, shelf)
    meta.gate.set()
    async with asyncio.timeout(5):
        for home, add, fence in waiting.values():
            if home == A:
                assert await add is Status.OK
                assert (await fence)[0] in (Status.OK, Status.NO_ENTRY)
            else:
                assert await add not in (Status.OK, Status.FENCED)
                assert (await fence)[0] is Status.UNKNOWN_LEDGER_STATE
    assert not shelf.storage.homes._in_flight


# docs/protocol.md B24
@in_world
async def test_fence_that_may_not_be_on_disk_is_not_confirmed(
    world: SimWorld, store: MemoryStore, meta: Naming
) -> None:
    """The ledger's writer was admitted here before, and would be again after a restart, because the admission is on
    disk."""
    shelf = await filled(world, store, meta)
    ledger = shelf.in_directory(B, LEDGERS)[0]
    world.node("b1").disk.die(B)
    meta.create(ledger, LedgerState.IN_RECOVERY)
    for _ in range(2):
        assert await shelf.status(ledger, fence=True) is Status.UNKNOWN_LEDGER_STATE


def test_directory_healthy_after_a_restart_has_everything(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    """A single sync failed. Nothing was taken over meanwhile, so nothing is in two places."""
    homes: dict[int, str] = {}

    async def first() -> None:
        shelf = await filled(world, store, meta)
        homes.update({ledger: shelf.home(ledger) for ledger in LEDGERS})
        for part in shelf.storage.parts:
            if part.directory.path == B:
                part.storage.journal._sync_failed(OSError(5, "the sync failed"))
        await asyncio.sleep(0)
        for ledger in LEDGERS:
            expected = Status.IO_ERROR if homes[ledger] == B else Status.OK
            assert await shelf.add(ledger, 3) is expected

    async def second() -> None:
        shelf = await open_spread(world, store, meta)
        for ledger in LEDGERS:
            assert shelf.home(ledger) == homes[ledger]
            assert await shelf.payload(ledger, 2) == b"hello"
            assert await shelf.add(ledger, 3) is Status.OK
        assert shelf.storage.homes.doubted == []

    run(world, first())
    crash(world, power=False)
    run(world, second())


def test_failure_of_the_last_directory_ends_the_process(world: SimWorld, store: MemoryStore, meta: Naming) -> None:
    async def scenario() -> None:
        shelf = await filled(world, store, meta)
        await lose(world, shelf)
        world.node("b1").disk.die(A)
        shelf.submit(150, 0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NodeCrashed):
        run(world, scenario())
    ((_, message),) = world.fatals
    assert message.startswith(A)
    world.fatals.clear()
