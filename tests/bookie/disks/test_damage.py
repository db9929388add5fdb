"""What the disk does wrong is told apart from what was never there."""

from __future__ import annotations

import pytest

from kvstore.bookie.replay import replay
from kvstore.bookie.upkeep.limbo import survey
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.support import OTHERS, Metadata, Shelf, crash, metadata, run, segments, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7
NEW = 99
"""A ledger made after the damage."""


async def opened(world: SimWorld, meta: Metadata | None = None, **config: int) -> Shelf:
    return await Shelf(world.env("b1"), tiny(**config), meta).start()


def written(world: SimWorld, count: int = 30, size: int = 300) -> SimDisk:
    """A disk with several segments of ledger L, and ledger 8 fenced; the process is gone."""

    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.status(8, fence=True) is Status.NO_ENTRY
        for entry in range(count):
            assert await shelf.add(L, entry, bytes([entry]) * size) is Status.OK
        shelf.storage.stop()

    run(world, write())
    crash(world, power=False)
    return world.node("b1").disk


async def idle(world: SimWorld) -> None:
    """A life in which nothing is stored."""
    await opened(world)
    await pause(1)


def offset_of(disk: SimDisk, path: str, payload: bytes) -> int:
    return bytes(disk.names.now.files[path].cache.data).index(payload)


def without_checkpoints(disk: SimDisk) -> None:
    for name in disk.list(tiny().index_dir):
        disk.remove(f"{tiny().index_dir}/{name}")


# A damaged packet


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("entry", [0, 29])
def test_flipped_bit_in_a_packet_is_an_error_and_never_absence(
    world: SimWorld, entry: int, with_checkpoint: bool
) -> None:
    disk = written(world)
    path = segments(disk)[0 if entry == 0 else -2]
    disk.flip_bit(path, 8 * (offset_of(disk, path, bytes([entry]) * 300) + 100))
    if not with_checkpoint:
        without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, entry) is Status.IO_ERROR
        assert await shelf.status(L, entry, fence=True) is Status.IO_ERROR
        assert shelf.storage.statistics.damaged_records > 0
        assert [await shelf.payload(L, each) for each in range(1, 29)] == [bytes([each]) * 300 for each in range(1, 29)]
        assert await shelf.status(L, 30) is Status.NO_ENTRY, "the damage concerns one entry"
        _, runs = await shelf.entries(L)
        listed = {each for first, count in runs for each in range(first, first + count)}
        assert listed == set(range(30)) - {entry}, "it is not listed, so that it is copied here again"
        assert await shelf.add(L, entry, bytes([entry]) * 300, recovery=True) is Status.OK
        assert await shelf.payload(L, entry) == bytes([entry]) * 300, "a peer's copy mends it"

    run(world, read())


def test_unreadable_sector_is_an_error_and_never_absence(world: SimWorld) -> None:
    disk = written(world)
    disk.fail_reads(segments(disk)[1])

    async def read() -> None:
        shelf = await opened(world)
        statuses = [await shelf.status(L, entry) for entry in range(31)]
        assert statuses.count(Status.IO_ERROR) > 5
        assert statuses.count(Status.NO_ENTRY) == 1
        assert statuses[30] is Status.NO_ENTRY
        assert (await shelf.poll(L, 12, 0))[0] is Status.OK

    run(world, read())


# Damage that hides records


def hide_a_record(world: SimWorld) -> SimDisk:
    """Damage the head of a record in the middle of the journal, with no checkpoint to say what stood there."""
    disk = written(world)
    path = segments(disk)[2]
    at = offset_of(disk, path, bytes([20]) * 300)
    disk.flip_bit(path, 8 * (at - 36 - 20))
    without_checkpoints(disk)
    return disk


# docs/protocol.md B7
def test_entries_hidden_by_a_damaged_head_are_unknown_not_absent(world: SimWorld) -> None:
    hide_a_record(world)

    async def read() -> None:
        shelf = await opened(world)
        there = [await shelf.status(L, entry) for entry in range(31)]
        assert there.count(Status.OK) >= 25
        assert set(there) == {Status.OK, Status.UNKNOWN_LEDGER_STATE}
        assert there[30] is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE, "it may have been among what is hidden"
        assert (await shelf.entries(50))[0] is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.entries(L))[0] is Status.OK, "what is here is no secret"
        assert (await shelf.read_lac(50))[0] is Status.UNKNOWN_LEDGER_STATE
        assert (await shelf.poll(50, 0))[0] is Status.UNKNOWN_LEDGER_STATE

    run(world, read())


def test_checkpoint_knows_entries_hidden_by_a_damaged_head(world: SimWorld) -> None:
    disk = written(world)
    path = segments(disk)[2]
    disk.flip_bit(path, 8 * (offset_of(disk, path, bytes([20]) * 300) - 36 - 20))

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 20) is Status.IO_ERROR
        assert await shelf.status(L, 30) is Status.NO_ENTRY
        assert await shelf.status(50, 0) is Status.NO_LEDGER

    run(world, read())


def test_crash_before_the_doubt_is_recorded_leaves_it_to_the_next_start(world: SimWorld) -> None:
    """A checkpoint of the damaged segment, made from what can still be read of it, would hide the damage for good."""
    disk = hide_a_record(world)

    async def read_back() -> None:
        replay(disk, tiny().journal_dir, tiny().index_dir)

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE

    for _ in range(2):
        run(world, read_back())
        crash(world)
    run(world, read())


def test_survey_limits_the_doubt_to_earlier_ledgers(world: SimWorld) -> None:
    hide_a_record(world)
    meta = Metadata()
    meta.known = {L: metadata(L), 8: metadata(8), 50: metadata(50), 60: metadata(60, *OTHERS)}

    async def look() -> None:
        shelf = await opened(world, meta)
        await survey(shelf.storage, meta)
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE, "it names this bookie"
        assert await shelf.status(60, 0) is Status.NO_LEDGER
        assert await shelf.add(NEW, 0) is Status.OK
        assert await shelf.status(NEW, 1) is Status.NO_ENTRY

    async def again() -> None:
        shelf = await opened(world, meta)
        assert not shelf.storage.inventory.is_limbo
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.status(NEW, 1) is Status.NO_ENTRY

    run(world, look())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


def test_doubt_outlives_a_crash_before_the_survey(world: SimWorld) -> None:
    hide_a_record(world)
    meta = Metadata()
    meta.is_away = True

    async def look() -> None:
        shelf = await opened(world, meta)
        world.env("b1").nursery.spawn(survey(shelf.storage, meta), name="survey")
        await pause(20)
        assert shelf.storage.inventory.is_limbo
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE

    for power in (True, False, True):
        run(world, look())
        crash(world, power=power)


# docs/protocol.md B10
def test_end_of_a_doubt_outlives_the_only_segment_that_records_it(world: SimWorld) -> None:
    """An older one, of a start that ended before the survey, says that it has begun, and stays for what it holds."""
    hide_a_record(world)
    meta = Metadata()
    meta.known = {L: metadata(L), 8: metadata(8), 50: metadata(50), 60: metadata(60, *OTHERS), NEW: metadata(NEW)}

    async def begin() -> None:
        assert await (await opened(world, meta)).add(50, 0) is Status.OK
        await pause(1)

    async def look() -> None:
        shelf = await opened(world, meta)
        assert shelf.storage.inventory.is_limbo
        await survey(shelf.storage, meta)
        surveyed, entry = shelf.storage.journal.synced_file, 0
        while shelf.storage.journal.synced_file == surveyed:
            assert await shelf.add(NEW, entry, b"x" * 300) is Status.OK
            entry += 1
        meta.known[NEW] = None
        reclaimer = Reclaimer(shelf.env, tiny(sparse_share=0.0), shelf.storage, meta)
        assert await reclaimer.drop_deleted() == [NEW]
        assert surveyed in await reclaimer.free_segments()

    async def again() -> None:
        shelf = await opened(world, meta)
        assert not shelf.storage.inventory.is_limbo
        assert await shelf.status(50, 0) is Status.OK
        assert await shelf.status(60, 0) is Status.NO_LEDGER, "it names others"

    run(world, begin())
    crash(world)
    run(world, look())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


def test_writer_of_a_doubted_ledger_continues_only_if_it_is_still_open(world: SimWorld) -> None:
    """Its fence may be among what is hidden; but who fences marks the ledger in the metadata first."""
    hide_a_record(world)
    meta = Metadata()
    meta.known[L] = metadata(L, state=LedgerState.IN_RECOVERY)
    meta.known[8] = metadata(8)

    async def write() -> None:
        shelf = await opened(world, meta)
        assert await shelf.add(L, 30) is Status.FENCED
        assert await shelf.add(8, 0) is Status.FENCED, "this fence is not hidden"
        meta.known[L] = metadata(L)
        assert await shelf.add(L, 30) is Status.OK
        assert await shelf.status(L, 31) is Status.UNKNOWN_LEDGER_STATE

    run(world, write())
