"""A disk that fails to sync ends the process, whatever could not be synced."""

from __future__ import annotations

from errno import EIO, ENOMEM, ENOSPC

import pytest

from kvstore.bookie.journal.segment import segment_name
from kvstore.bookie.journal.supply import POLL_S
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Shelf, crash, in_world, run, tiny
from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = 7


async def opened(world: SimWorld, **config: int) -> Shelf:
    return await Shelf(world.env("b1"), tiny(**config)).start()


# docs/protocol.md L12
def test_failed_sync_ends_the_process_and_acknowledges_nothing(world: SimWorld) -> None:
    told: list[Status] = []

    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 0) is Status.OK
        world.node("b1").disk.fail_sync()
        for entry in (1, 2):
            shelf.submit(L, entry).add_done_callback(lambda answer: told.append(answer.result()))
        shelf.submit_read(8, fence=True).add_done_callback(lambda answer: told.append(answer.result()[0]))
        await pause(5)

    with pytest.raises(NodeCrashed):
        run(world, write())
    assert told == []
    assert "sync failed" in world.fatals[0][1]

    async def again() -> None:
        shelf = await opened(world)
        assert await shelf.status(L, 0) is Status.OK
        assert shelf.storage.statistics.damaged_records == 0

    run(world, again())


def test_failed_sync_of_zeros_written_ahead_ends_the_process(world: SimWorld) -> None:
    """They are in the file in which groups are written next, and a disk reports an error to only one sync."""

    async def write() -> None:
        shelf = await opened(world, segment_bytes=8 << 20)
        for entry in range(20):
            world.node("b1").disk.fail_sync(2)  # the first one is the group's
            assert await shelf.add(L, entry, b"x" * 3_000) is Status.OK
            await pause(0.01)

    with pytest.raises(NodeCrashed):
        run(world, write())
    assert "sync failed" in world.fatals[0][1]


def test_sync_rejected_by_the_kernel_ends_the_process(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(ENOMEM, "no memory for a sync")

    async def write() -> None:
        shelf = await opened(world)
        monkeypatch.setattr(SimFile, "submit_sync", refuse)
        await shelf.add(L, 0)

    with pytest.raises(NodeCrashed):
        run(world, write())
    assert "no memory for a sync" in world.fatals[0][1]


def test_directory_that_cannot_be_synced_ends_the_process(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(EIO, "the directory's sync failed")

    async def write() -> None:
        shelf = await opened(world)
        monkeypatch.setattr(SimDisk, "sync_dir", fail)
        for entry in range(40):
            await shelf.add(L, entry, b"x" * 300)

    with pytest.raises(NodeCrashed):
        run(world, write())
    assert "the directory's sync failed" in world.fatals[0][1]


@in_world
async def test_checkpoint_that_cannot_be_written_leaves_no_file_open(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished: list[str] = []
    pwrite, close = SimFile.pwrite, SimFile.close

    def refused(file: SimFile, offset: int, data: bytes) -> None:
        if file._path.endswith(".index"):
            unfinished.append(file._path)
            raise OSError(ENOSPC, "no room")
        pwrite(file, offset, data)

    def closed(file: SimFile) -> None:
        if file._path in unfinished:
            unfinished.remove(file._path)
        close(file)

    shelf = await opened(world)
    monkeypatch.setattr(SimFile, "pwrite", refused)
    monkeypatch.setattr(SimFile, "close", closed)
    for entry in range(40):
        assert await shelf.add(L, entry, b"x" * 300) is Status.OK
    assert shelf.storage.journal.synced_file > 2
    assert unfinished == []


# Disks that are full when the bookie starts


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("entries", [1, 25])
def test_bookie_that_starts_on_a_full_disk_serves_reads_and_fences(
    world: SimWorld, entries: int, is_clean: bool
) -> None:
    disk = world.node("b1").disk

    async def write() -> None:
        shelf = await opened(world)
        for entry in range(entries):
            assert await shelf.add(L, entry, b"x" * 300) is Status.OK
        if is_clean:
            shelf.storage.stop()

    async def again() -> None:
        shelf = await opened(world)
        assert shelf.storage.is_readonly
        assert shelf.storage.statistics.damaged_records == 0
        assert [await shelf.status(L, each) for each in range(entries)] == [Status.OK] * entries
        assert await shelf.add(L, entries) is Status.READ_ONLY
        assert await shelf.status(9, fence=True) is Status.NO_ENTRY
        disk.mend()
        await pause(3)
        assert await shelf.add(L, entries) is Status.OK

    run(world, write())
    crash(world)
    disk.set_capacity(used(disk))
    run(world, again())


def test_readonly_bookie_restarts_as_readonly_and_loses_nothing(world: SimWorld) -> None:
    disk = world.node("b1").disk
    entries = 0

    async def fill() -> None:
        nonlocal entries
        shelf = await opened(world)
        disk.set_capacity(6 * 4096)
        while await shelf.add(L, entries, b"x" * 300) is Status.OK:
            entries += 1

    async def again() -> None:
        shelf = await opened(world)
        assert shelf.storage.is_readonly
        assert [await shelf.status(L, each) for each in range(entries)] == [Status.OK] * entries

    run(world, fill())
    disk.set_capacity(used(disk))
    for _ in range(5):
        crash(world)
        run(world, again())


def used(disk: SimDisk) -> int:
    return disk.config.capacity_bytes - disk.free_bytes()


# docs/protocol.md L12
@pytest.mark.parametrize("what", ["journal", "segment"])
def test_removal_of_journal_files_ends_the_process(world: SimWorld, what: str) -> None:
    """Writes and syncs still succeed, but nobody would find the files again."""

    async def write() -> None:
        shelf = await opened(world)
        assert await shelf.add(L, 0) is Status.OK
        disk, folder = world.node("b1").disk, shelf.storage.inventory.segments[1].directory
        names = disk.list(folder) if what == "journal" else [segment_name(max(shelf.storage.inventory.segments))]
        for name in names:
            disk.remove(f"{folder}/{name}")
        assert await shelf.add(L, 1) is Status.OK, "it cannot know yet"
        await pause(2 * POLL_S)

    with pytest.raises(NodeCrashed):
        run(world, write())
    assert "are gone from" in world.fatals[0][1]
