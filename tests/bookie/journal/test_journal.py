"""Group commit, segments, and the journal's records about itself."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from kvstore.bookie.journal.record import (
    FileHeader,
    RecordKind,
    decode_file_header,
    decode_group_header,
    encode_file_header,
)
from kvstore.bookie.journal.scan import scan
from kvstore.bookie.journal.segment import PAGE, segment_name
from kvstore.bookie.steps import at_once
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Shelf, in_world, packet, run, segments, tiny
from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.env import NodeCrashed, SimWorld
from tests.sim.world.pause import pause

L = 7


async def opened(world: SimWorld, **config: int) -> Shelf:
    return await Shelf(world.env("b1"), tiny(**config)).start()


def content(disk: SimDisk, path: str) -> bytes:
    cache = disk.names.now.files[path].cache
    return cache.read(0, cache.size)


def scanned(disk: SimDisk, path: str):  # type: ignore[no-untyped-def]
    data = content(disk, path)
    header = decode_file_header(data)
    assert header is not None
    return header, at_once(scan(data, header.file, header.salt))


@in_world
async def test_groups_and_barriers_wait_while_a_certificate_is_written(
    world: SimWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is on disk after a certificate that is not would be behind a gap, where no start finds it."""
    shelf = await opened(world, segment_bytes=1 << 16)
    disk, held = world.node("b1").disk, []
    submit = SimFile.submit_write

    def hold(self: SimFile, offset: int, data: bytes, done: Any, *, is_synced: bool = True) -> None:
        if is_synced or held:
            submit(self, offset, data, done, is_synced=is_synced)
        else:
            held.append(lambda: submit(self, offset, data, done, is_synced=False))

    await shelf.add(L, 0)
    monkeypatch.setattr(SimFile, "submit_write", hold)
    await pause(0.1)
    assert len(held) == 1
    told: list[str] = []
    shelf.storage.journal.barrier(lambda: told.append("barrier"))
    adding = shelf.submit(L, 1)
    _, before = scanned(disk, segments(disk)[0])
    await pause(0.1)
    _, after = scanned(disk, segments(disk)[0])
    assert (after.end, told, adding.done()) == (before.end, [], False)
    held[0]()
    assert await adding is Status.OK
    assert told == ["barrier"]
    _, last = scanned(disk, segments(disk)[0])
    assert last.end > before.end


@in_world
async def test_idle_journal_certifies_its_last_group(world: SimWorld) -> None:
    """So that later damage to it is not taken for a torn tail."""
    shelf = await opened(world, segment_bytes=1 << 16)
    await shelf.add(L, 0)
    syncs = shelf.storage.statistics.syncs
    _, before = scanned(world.node("b1").disk, segments(world.node("b1").disk)[0])
    assert before.synced_to < before.end
    await pause(0.1)
    _, after = scanned(world.node("b1").disk, segments(world.node("b1").disk)[0])
    assert after.synced_to == before.end
    assert shelf.storage.statistics.syncs == syncs, "that needs no sync of its own"
    assert await shelf.add(L, 1) is Status.OK


@in_world
async def test_stopped_journal_certifies_its_last_group(world: SimWorld) -> None:
    shelf = await opened(world, segment_bytes=1 << 16)
    await shelf.add(L, 0)
    shelf.storage.stop()
    _, result = scanned(world.node("b1").disk, segments(world.node("b1").disk)[0])
    assert result.synced_to == result.end - 44


def test_segment_begins_with_the_file_list_and_ends_with_the_next_segment(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        for entry in range(40):
            await shelf.add(L, entry, b"x" * 300)

    run(world, scenario())
    disk = world.node("b1").disk
    paths = segments(disk)
    for path, after in pairwise(paths[:-1]):
        header, result = scanned(disk, path)
        assert result.records[0].head.kind == RecordKind.FILES
        assert (result.records[-1].head.kind, result.records[-1].head.entry) == (RecordKind.NEXT, header.file + 1)
        following = decode_file_header(content(disk, after))
        assert following is not None
        first = decode_group_header(content(disk, after), 64, following.salt, 64)
        assert first is not None
        assert (first.synced_file, first.synced_to) == (header.file, result.end)


def test_group_numbers_rise_over_segments_and_starts(world: SimWorld) -> None:
    numbers: list[int] = []

    async def life(first: int) -> None:
        shelf = await opened(world)
        for entry in range(first, first + 20):
            await shelf.add(L, entry, b"x" * 200)
            numbers.append(shelf.storage.journal.synced_group)

    for life_number in range(3):
        run(world, life(20 * life_number))
        world.node("b1").crash(power=life_number == 1)
    assert numbers == sorted(set(numbers))


@in_world
async def test_error_of_one_sender_keeps_nobody_from_an_answer(world: SimWorld) -> None:
    shelf = await opened(world)
    await shelf.add(L, 0)

    def faulty(_status: Status) -> None:
        raise RuntimeError("a bug")

    shelf.storage.add(L, 1, packet(L, 1), b"", recovery=False, done=lambda _status: None)
    body = packet(L, 1)
    key = shelf.storage.inventory.ledgers[L].key
    shelf.storage.add(L, 1, body, key, recovery=False, done=faulty)
    fencing = shelf.submit_read(8, fence=True)
    assert await shelf.add(L, 2) is Status.OK
    assert (await fencing)[0] is Status.NO_ENTRY
    assert await shelf.status(L, 1) is Status.OK


@in_world
async def test_zeros_are_written_ahead_of_small_groups_to_save_metadata_syncs(world: SimWorld) -> None:
    shelf = await opened(world, segment_bytes=8 << 20)
    for entry in range(200):
        await shelf.add(L, entry, b"x" * 3_000)
    spare = shelf.storage.journal.supply.spare
    assert spare is not None
    assert spare.filled > 600_000
    assert shelf.storage.statistics.filled_bytes == spare.filled - len(PAGE)
    assert spare.handle.read(0, 64) == encode_file_header(FileHeader(spare.file, spare.salt))


@in_world
async def test_large_groups_write_no_byte_twice(world: SimWorld) -> None:
    shelf = await opened(world, segment_bytes=8 << 20)
    for entry in range(20):
        await shelf.add(L, entry, b"x" * 100_000)
        await pause(0.01)
    assert shelf.storage.statistics.filled_bytes == 0


# docs/protocol.md B35
def test_segment_created_by_another_process_is_left_alone(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await opened(world)
        disk = world.node("b1").disk
        another = f"{tiny().journal_dir}/{segment_name(shelf.storage.journal.supply.next_file)}"
        disk.open(another, create=True).pwrite(0, b"another's")
        for entry in range(100):
            await shelf.add(L, entry, b"x" * 300)

    with pytest.raises(NodeCrashed):
        run(world, scenario())
    ((_, reason),) = world.fatals
    assert "another process has created this segment" in reason
    disk = world.node("b1").disk
    assert b"another's" in [content(disk, path) for path in segments(disk)]


@in_world
async def test_few_segments_are_open_at_a_time(world: SimWorld) -> None:
    shelf = await opened(world)
    shelf.storage.inventory.open_files._files_max = 3
    for entry in range(100):
        await shelf.add(L, entry, b"x" * 300)
    for entry in [*range(100), 50, 1, 99]:
        assert await shelf.payload(L, entry) == b"x" * 300
    open_files = [each for each in shelf.storage.inventory.segments.values() if each._file is not None]
    assert len(open_files) <= 4


@in_world
async def test_bytes_waiting_for_a_sync_are_bounded(world: SimWorld) -> None:
    shelf = await opened(world, segment_bytes=1 << 20, pending_bytes_max=50_000)
    await shelf.add(L, 0)
    world.node("b1").disk.slow_syncs((1, 1))
    answers = [shelf.submit(L, entry, b"x" * 1000) for entry in range(1, 151)]
    assert shelf.storage.sync_gate.is_shut, "others have been waiting since 50,000 bytes"
    recovery = shelf.submit(L, 200, b"x" * 1000, recovery=True)
    refused = [answer.result() for answer in answers if answer.done()]
    assert set(refused) == {Status.TOO_MANY_REQUESTS}
    assert 45 <= len(refused) <= 55
    assert await recovery is Status.OK
    results = await asyncio.wait_for(collected(answers), 10)
    assert results.count(Status.OK) == 150 - len(refused)
    assert shelf.storage.adds.pending_bytes == 0


async def collected(answers: list[asyncio.Future[Status]]) -> list[Status]:
    return [await answer for answer in answers]
