"""What the disk does wrong is told apart from what was never there."""

from __future__ import annotations

import pytest

from kvstore.bookie.replay import replay
from kvstore.bookie.upkeep.limbo import survey
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


def offset_of(disk: SimDisk, path: str, payload: bytes) -> int:
    return bytes(disk.names.now.files[path].cache.data).index(payload)


def without_checkpoints(disk: SimDisk) -> None:
    for name in disk.list(tiny().index_dir):
        disk.remove(f"{tiny().index_dir}/{name}")


# A damaged packet


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("entry", [0, 29])
def test_a_flipped_bit_in_a_packet_is_an_error_and_never_absence(
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


def test_an_unreadable_sector_is_an_error_and_never_absence(world: SimWorld) -> None:
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
def test_what_a_damaged_head_hides_is_unknown_and_never_absent(world: SimWorld) -> None:
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


def test_a_checkpoint_knows_what_a_damaged_head_hides(world: SimWorld) -> None:
    disk = written(world)
    path = segments(disk)[2]
    disk.flip_bit(path, 8 * (offset_of(disk, path, bytes([20]) * 300) - 36 - 20))

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 20) is Status.IO_ERROR
        assert await shelf.status(L, 30) is Status.NO_ENTRY
        assert await shelf.status(50, 0) is Status.NO_LEDGER

    run(world, read())


def test_a_crash_before_the_doubt_is_written_down_leaves_it_to_the_next_start(world: SimWorld) -> None:
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


def test_after_the_survey_only_ledgers_of_before_are_doubted(world: SimWorld) -> None:
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


def test_the_doubt_outlives_a_crash_before_the_survey(world: SimWorld) -> None:
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


def test_a_writer_of_a_doubted_ledger_goes_on_only_if_it_is_still_open(world: SimWorld) -> None:
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


# Missing and truncated files


def test_a_missing_segment_makes_everything_doubtful(world: SimWorld) -> None:
    disk = written(world)
    disk.remove(segments(disk)[1])
    without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        there = {await shelf.status(L, entry) for entry in range(31)}
        assert there == {Status.OK, Status.UNKNOWN_LEDGER_STATE}
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE

    run(world, read())


def test_of_a_missing_segment_with_a_checkpoint_it_is_known_what_is_lost(world: SimWorld) -> None:
    disk = written(world)
    disk.remove(segments(disk)[1])

    async def read() -> None:
        shelf = await opened(world)
        there = [await shelf.status(L, entry) for entry in range(31)]
        assert set(there[:30]) == {Status.OK, Status.IO_ERROR}
        assert there[30] is Status.NO_ENTRY
        assert await shelf.add(8, 0) is Status.FENCED

    for _ in range(3):
        run(world, read())
        crash(world)


def test_a_missing_newest_segment_is_noticed(world: SimWorld) -> None:
    """The segment before it names it as the next."""
    disk = written(world)
    disk.remove(segments(disk)[-1])  # the one ahead
    disk.remove(segments(disk)[-1])

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE

    run(world, read())


def test_a_missing_newest_segment_is_noticed_though_it_was_begun_by_a_start(world: SimWorld) -> None:
    """No record of the segment before it names it: the list beside that one's checkpoint does."""
    disk = written(world)

    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 31, recovery=True) is Status.OK
        await pause(1)

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 31) is Status.UNKNOWN_LEDGER_STATE

    run(world, write())
    crash(world)
    disk.remove(segments(disk)[-1])  # the one ahead
    disk.remove(segments(disk)[-1])
    run(world, read())


@pytest.mark.parametrize("last", ["add", "survey"])
def test_what_is_written_once_more_at_a_start_is_doubted_too(world: SimWorld, last: str) -> None:
    """Of a ledger whose first record that is left was never certified as synced. Nor does the end of a former doubt,
    found among such records, end this one."""
    new, meta = 77, Metadata()

    async def write() -> None:
        shelf = await Shelf(world.env("b1"), meta=meta).start()
        if last == "survey":
            assert await shelf.add(new, 0) is Status.OK
        shelf.storage.inventory.set_limbo(True)
        await survey(shelf.storage, meta)
        if last == "add":
            assert await shelf.add(new, 0) is Status.OK

    async def judge(*doubts: str) -> None:
        shelf = Shelf(world.env("b1"), meta=meta)
        await shelf.storage.start(doubts)
        meta.known[new] = metadata(new, state=LedgerState.IN_RECOVERY)
        assert await shelf.status(new, 1) is Status.UNKNOWN_LEDGER_STATE, "it may have been in what was lost"
        assert await shelf.status(78, 0) is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.add(new, 1) is Status.FENCED, "a fence may have been there too"

    run(world, write())
    crash(world, power=False)
    run(world, judge("it is a copy"))
    crash(world, power=False)
    run(world, judge())


@pytest.mark.parametrize("lost", [0, -1])
def test_without_the_list_of_segments_a_missing_one_is_noticed(world: SimWorld, lost: int) -> None:
    """A crash right after the newest checkpoint was written has left no list beside it (docs/protocol.md, B22)."""
    disk = written(world)
    for name in disk.list(tiny().index_dir):
        if name.endswith(".files"):
            disk.remove(f"{tiny().index_dir}/{name}")
    disk.remove(segments(disk)[-1])  # the one ahead
    disk.remove(segments(disk)[-1])
    disk.remove(segments(disk)[lost])

    async def read() -> None:
        shelf = await opened(world)
        assert Status.NO_ENTRY not in {await shelf.status(L, entry) for entry in range(31)}

    for _ in range(2):
        run(world, read())
        crash(world)


@pytest.mark.parametrize("which", [1, -2])
def test_a_segment_cut_short_in_its_synced_part_is_damaged(world: SimWorld, which: int) -> None:
    disk = written(world)
    path = segments(disk)[which]
    disk.names.now.files[path].cache.resize(500)
    without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        assert Status.NO_ENTRY not in {await shelf.status(L, entry) for entry in range(31)}

    if which == -2:
        return  # its own headers went with it: nobody knows that there was more
    run(world, read())


def test_a_damaged_file_header_is_damage_and_the_file_is_kept(world: SimWorld) -> None:
    disk = written(world)
    path = segments(disk)[1]
    disk.flip_bit(path, 8 * 20)
    without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE
        assert disk.exists(path.replace(".journal", ".damaged"))

    run(world, read())


@pytest.mark.parametrize("byte", [0, 11, 13, 100, 500])
def test_a_damaged_checkpoint_only_costs_a_scan(world: SimWorld, byte: int) -> None:
    disk = written(world)
    for name in disk.list(tiny().index_dir):
        disk.flip_bit(f"{tiny().index_dir}/{name}", 8 * byte)

    async def read() -> None:
        shelf = await opened(world)
        assert [await shelf.payload(L, each) for each in range(30)] == [bytes([each]) * 300 for each in range(30)]
        assert await shelf.status(L, 30) is Status.NO_ENTRY
        assert shelf.storage.statistics.damaged_records == 0

    run(world, read())


# Syncs that fail, disks that are full


def test_a_full_disk_makes_the_bookie_read_only_and_room_makes_it_writable_again(world: SimWorld) -> None:
    moves: list[bool] = []

    async def fill() -> None:
        shelf = await opened(world)
        disk = world.node("b1").disk
        shelf.storage.on_readonly(moves.append)
        disk.set_capacity(6 * 4096)
        entry = 0
        while (status := await shelf.add(L, entry, b"x" * 300)) is Status.OK:
            entry += 1
        assert status is Status.READ_ONLY
        assert moves == [True]
        assert shelf.storage.is_readonly
        assert await shelf.status(L, 0) is Status.OK, "reads are served"
        assert await shelf.add(L, entry, recovery=True) is Status.OK, "recovery writes on from the reserve"
        assert await shelf.status(9, fence=True) is Status.NO_ENTRY, "fences too"
        assert await shelf.add(9, 0) is Status.FENCED
        assert await shelf.write_lac(L, 1) is Status.READ_ONLY
        disk.set_capacity(1 << 30)
        await pause(3)
        assert moves == [True, False]
        assert await shelf.add(L, entry + 1) is Status.OK

    run(world, fill())


def test_recovery_on_a_full_disk_is_refused_when_the_reserve_is_used_up_and_nothing_breaks(world: SimWorld) -> None:
    async def fill() -> None:
        shelf = await opened(world)
        world.node("b1").disk.set_capacity(6 * 4096)
        entry = 0
        while (status := await shelf.add(L, entry, b"x" * 300, recovery=True)) is Status.OK:
            entry += 1
        assert status is Status.READ_ONLY
        fences = [await shelf.status(ledger, fence=True) for ledger in range(100, 200)]
        assert set(fences) == {Status.NO_ENTRY, Status.IO_ERROR}, "a fence that cannot be kept is not confirmed"
        assert [await shelf.status(L, each) for each in range(entry)] == [Status.OK] * entry

    run(world, fill())
    crash(world)
    world.node("b1").disk.set_capacity(1 << 30)

    async def again() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 0) is Status.OK

    run(world, again())


# docs/protocol.md B9
def test_the_reserve_is_kept_free_for_what_must_not_fail(world: SimWorld) -> None:
    async def fill() -> None:
        shelf = await opened(world, reserve_bytes=100_000)
        disk = world.node("b1").disk
        disk.set_capacity(200_000)
        entry = 0
        while await shelf.add(L, entry, b"x" * 300) is Status.OK:
            entry += 1
        assert 95_000 <= disk.free_bytes() <= 110_000, "checkpoints come out of it"

    run(world, fill())
