"""Files of a bookie that are missing, cut short, damaged at the beginning or end, or of another bookie."""

from __future__ import annotations

from errno import EIO

import pytest

from kvstore.bookie import storage
from kvstore.bookie.upkeep.limbo import survey
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.disks.test_damage import L, idle, offset_of, opened, without_checkpoints, written
from tests.bookie.support import Metadata, Shelf, crash, in_world, metadata, run, segments, tiny
from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

# Missing and truncated files


def test_missing_segment_makes_everything_doubtful(world: SimWorld) -> None:
    disk = written(world)
    disk.remove(segments(disk)[1])
    without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        there = {await shelf.status(L, entry) for entry in range(31)}
        assert there == {Status.OK, Status.UNKNOWN_LEDGER_STATE}
        assert await shelf.status(50, 0) is Status.UNKNOWN_LEDGER_STATE

    run(world, read())


def test_missing_segment_with_a_checkpoint_has_known_losses(world: SimWorld) -> None:
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


def test_missing_newest_segment_is_noticed(world: SimWorld) -> None:
    """The segment before it names it as the next."""
    disk = written(world)
    disk.remove(segments(disk)[-1])  # the one ahead
    disk.remove(segments(disk)[-1])

    async def read() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 30) is Status.UNKNOWN_LEDGER_STATE

    run(world, read())


def expect_doubt_once_the_newest_is_gone(world: SimWorld, disk: SimDisk) -> None:
    """Store an entry, lose the segment that has it, and start again."""

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


@pytest.mark.parametrize("starts", [0, 1, 2, 3])
def test_missing_newest_segment_begun_by_a_start_is_noticed(world: SimWorld, starts: int) -> None:
    """No record of the segment before names it; the list beside that segment's checkpoint does. Also if starts came
    before, whose empty segments are removed."""
    disk = written(world)
    for _ in range(starts):
        run(world, idle(world))
        crash(world)
    expect_doubt_once_the_newest_is_gone(world, disk)


# docs/protocol.md B22
@pytest.mark.parametrize("starts", [1, 2])
def test_missing_newest_segment_is_noticed_after_its_namer_was_removed(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    disk = written(world)
    with monkeypatch.context() as patch:  # as the starts of a former release
        patch.setattr(storage, "release_empty_segments", lambda *_: None)
        for _ in range(3):
            run(world, idle(world))
            crash(world)
    for _ in range(starts - 1):
        run(world, idle(world))
        crash(world)
    expect_doubt_once_the_newest_is_gone(world, disk)


# docs/protocol.md B6
@pytest.mark.parametrize("is_clean", [True, False])
def test_bad_sector_at_the_end_of_the_journal_is_no_torn_tail(world: SimWorld, is_clean: bool) -> None:
    """The certificate of its groups is in the same sector as the groups. A crash leaves readable bytes."""
    config = tiny(segment_bytes=1 << 16)

    async def write() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        for entry in range(20):
            assert await shelf.add(L, entry, b"x" * 300) is Status.OK
        await pause(1)
        if is_clean:
            shelf.storage.stop()

    async def read() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        there = [await shelf.status(L, entry) for entry in range(21)]
        assert set(there) <= {Status.OK, Status.IO_ERROR, Status.UNKNOWN_LEDGER_STATE}
        assert there[:5] == [Status.OK] * 5
        assert there[20] is Status.UNKNOWN_LEDGER_STATE

    run(world, write())
    crash(world, power=False)
    disk = world.node("b1").disk
    disk.fail_reads(segments(disk, config)[0], range(4096, 8192))
    for _ in range(3):
        run(world, read())
        crash(world)


# docs/protocol.md B6
def test_damage_in_a_single_group_certified_by_the_next_is_no_torn_tail(
    world: SimWorld,
) -> None:
    """A burst filled the segment during one sync, and the crash came before its index file was on disk."""
    disk = world.node("b1").disk

    async def write() -> None:
        shelf = await opened(world)
        answers = [shelf.submit(L, entry, bytes([entry]) * 300) for entry in range(30)]
        assert {await answer for answer in answers} == {Status.OK}

    async def read() -> None:
        shelf = await opened(world)
        there = [await shelf.status(L, entry) for entry in range(31)]
        assert set(there) == {Status.OK, Status.UNKNOWN_LEDGER_STATE}, "all of them were acknowledged"

    run(world, write())
    crash(world, power=False)
    without_checkpoints(disk)
    burst = segments(disk)[1]
    lost = next(each for each in range(5, 30) if bytes([each]) * 300 in disk.names.now.files[burst].cache.data)
    disk.flip_bit(burst, 8 * (offset_of(disk, burst, bytes([lost]) * 300) - 36 - 20))
    for _ in range(2):
        run(world, read())
        crash(world)


# docs/protocol.md B6
@pytest.mark.parametrize("how", ["flipped", "not given"])
def test_damaged_header_of_an_unnamed_segment_is_no_torn_one(world: SimWorld, how: str) -> None:
    """A disk with less free space than the reserve takes no index files, and so no list of the segments. Groups are
    written only once the header is on disk, so a segment that has a group, or cannot be read, is not the result of a
    crash."""
    disk, reserve = written(world), 64 << 10
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + 20_000)

    async def write() -> None:
        shelf = await opened(world, reserve_bytes=reserve)
        assert await shelf.status(9, fence=True) is Status.NO_ENTRY
        await pause(1)

    async def read() -> None:
        shelf = await opened(world, reserve_bytes=reserve)
        assert await shelf.status(9, 0) is Status.UNKNOWN_LEDGER_STATE
        assert shelf.meta.asked == []
        await shelf.add(9, 0)
        assert shelf.meta.asked == [9], "its fence is forgotten, but the recovery marked the metadata"

    run(world, write())
    crash(world)
    path = segments(disk)[-1]
    if how == "flipped":
        disk.flip_bit(path, 100)
    else:
        disk.fail_reads(path, range(1))
    for _ in range(2):
        run(world, read())
        crash(world)


# docs/protocol.md B6, B7
@pytest.mark.parametrize("segment", [0, 1])
def test_segment_with_an_unreadable_inode_is_not_absent(
    world: SimWorld, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first life, only the directory names the segment that is being written, and the one ahead."""
    config = tiny(segment_bytes=1 << 16)

    async def write() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        for entry in range(5):
            assert await shelf.add(L, entry) is Status.OK
        await pause(1)

    async def read() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        assert await shelf.status(L, 0) is (Status.OK if segment == 1 else Status.UNKNOWN_LEDGER_STATE)
        assert await shelf.status(L, 5) is Status.UNKNOWN_LEDGER_STATE
        await pause(1)

    run(world, write())
    crash(world, power=False)
    disk = world.node("b1").disk
    lost = segments(disk, config)[segment]
    exists, opened, rename = disk.exists, disk.open, disk.rename

    def fails_on_it(path: str) -> None:
        if path == lost:
            raise OSError(EIO, f"{path}: its inode cannot be read")

    def open_others(path: str, *, create: bool = False) -> SimFile:
        fails_on_it(path)
        return opened(path, create=create)

    def rename_others(old: str, new: str) -> None:
        fails_on_it(old)
        rename(old, new)

    monkeypatch.setattr(disk, "exists", lambda path: path != lost and exists(path))
    monkeypatch.setattr(disk, "open", open_others)
    monkeypatch.setattr(disk, "rename", rename_others)
    for _ in range(3):
        run(world, read())
        crash(world, power=False)


def test_damaged_segment_is_kept_for_inspection(world: SimWorld) -> None:
    """No record of any ledger can be read in it, but it is not a segment without records."""
    disk = written(world)
    without_checkpoints(disk)
    path = segments(disk)[2]
    disk.fail_reads(path, range(100, 1 << 30))

    async def start() -> None:
        await opened(world)
        await pause(1)

    for _ in range(3):
        run(world, start())
        crash(world)
    assert disk.exists(path)


@pytest.mark.parametrize("last", ["add", "survey"])
def test_records_written_again_at_a_start_are_doubted_too(world: SimWorld, last: str) -> None:
    """Concerns a ledger whose first remaining record was never certified as synced. The end of a former doubt, found
    among such records, does not end this doubt either."""
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
        assert await shelf.status(new, 1) is Status.UNKNOWN_LEDGER_STATE, "it may have been in the lost segment"
        assert await shelf.status(78, 0) is Status.UNKNOWN_LEDGER_STATE
        assert await shelf.add(new, 1) is Status.FENCED, "a fence may have been there too"

    run(world, write())
    crash(world, power=False)
    run(world, judge("it is a copy"))
    crash(world, power=False)
    run(world, judge())


@pytest.mark.parametrize("lost", [0, -1])
def test_missing_segment_is_noticed_without_the_list_of_segments(world: SimWorld, lost: int) -> None:
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
def test_segment_cut_short_in_its_synced_part_is_damaged(world: SimWorld, which: int) -> None:
    disk = written(world)
    path = segments(disk)[which]
    disk.names.now.files[path].cache.resize(500)
    without_checkpoints(disk)

    async def read() -> None:
        shelf = await opened(world)
        assert Status.NO_ENTRY not in {await shelf.status(L, entry) for entry in range(31)}

    if which == -2:
        return  # its own headers are gone too, so nobody knows that there was more
    run(world, read())


def test_damaged_file_header_is_damage_and_the_file_is_kept(world: SimWorld) -> None:
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
def test_damaged_checkpoint_only_costs_a_scan(world: SimWorld, byte: int) -> None:
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


@in_world
async def test_full_disk_makes_the_bookie_readonly_until_space_is_freed(world: SimWorld) -> None:
    moves: list[bool] = []
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
    assert await shelf.add(L, entry, recovery=True) is Status.OK, "recovery continues to write from the reserve"
    assert await shelf.status(9, fence=True) is Status.NO_ENTRY, "fences too"
    assert await shelf.add(9, 0) is Status.FENCED
    assert await shelf.write_lac(L, 1) is Status.READ_ONLY
    disk.set_capacity(1 << 30)
    await pause(3)
    assert moves == [True, False]
    assert await shelf.add(L, entry + 1) is Status.OK


def test_recovery_is_refused_when_the_reserve_is_used_up(world: SimWorld) -> None:
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
@in_world
async def test_reserve_is_kept_free_for_records_that_must_not_fail(world: SimWorld) -> None:
    shelf = await opened(world, reserve_bytes=100_000)
    disk = world.node("b1").disk
    disk.set_capacity(200_000)
    entry = 0
    while await shelf.add(L, entry, b"x" * 300) is Status.OK:
        entry += 1
    assert 95_000 <= disk.free_bytes() <= 110_000, "checkpoints use the reserve"


# docs/protocol.md B31
@pytest.mark.parametrize("where", [range(1), range(200, 1 << 30)])
def test_unreadable_index_does_not_prevent_a_start(world: SimWorld, where: range) -> None:
    """The segments are the truth, and the rebuilt files replace the unreadable ones."""
    disk = written(world)
    for name in disk.list(tiny().index_dir):
        disk.fail_reads(f"{tiny().index_dir}/{name}", where)

    async def read() -> None:
        shelf = await opened(world)
        assert [await shelf.status(L, entry) for entry in range(31)] == [Status.OK] * 30 + [Status.NO_ENTRY]
        await pause(1)

    for _ in range(2):
        run(world, read())
        crash(world)


def test_segment_replaced_by_another_is_missed(world: SimWorld) -> None:
    """Segments have the same names in all directories. A file in the wrong directory shows its own records, and hides
    those that belong there."""
    disk, strange = written(world), 5

    async def write() -> None:
        shelf = await Shelf(world.env("b2")).start()
        for entry in range(30):
            assert await shelf.add(strange, entry, bytes([entry]) * 300) is Status.OK

    run(world, write(), "b2")
    path, other = segments(disk)[1], world.node("b2").disk
    content = bytes(other.names.now.files[segments(other)[1]].cache.data)
    disk.overwrite(path, 0, content)

    async def read() -> None:
        shelf = await opened(world)
        assert Status.NO_ENTRY not in {await shelf.status(L, entry) for entry in range(30)}

    for _ in range(2):
        run(world, read())
        crash(world)
