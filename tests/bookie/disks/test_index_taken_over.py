"""Index directories of a former version, or lost ones, are recreated at start (docs/protocol.md, B31)."""

from __future__ import annotations

from random import Random
from struct import pack

import pytest
from crc32c import crc32c

from kvstore.bookie.index.blocks import block_span, blocks_of
from kvstore.bookie.index.checkpoint import HEADER_SIZE, table_span
from kvstore.bookie.index.checkpoints import read_checkpoint
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.reserve import start_bytes
from kvstore.bookie.journal.supply import POLL_S
from kvstore.proto.bookkeeper import Status
from tests.bookie.index.index_support import (
    CONFIG,
    L,
    all_whole,
    check,
    filled,
    in_memory,
    index_files,
    path_of,
    payload_of,
    statistics,
)
from tests.bookie.support import Shelf, crash, in_world, run, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, crash_images
from tests.sim.world.pause import pause


def as_format_2(disk: SimDisk, file: int) -> None:
    """Convert the checkpoint of a segment into the format of former versions."""
    checkpoint = read_checkpoint(disk, CONFIG.index_dir, file)
    assert checkpoint is not None
    parts = [
        pack(
            ">IQQQBIIIII", file, checkpoint.salt, checkpoint.end, checkpoint.last_group, checkpoint.is_limbo, 0,
            len(checkpoint.dropped), len(checkpoint.tombstones), len(checkpoint.ledgers), 0,
        ),
        *(pack(">Q", each) for each in (*checkpoint.dropped, *checkpoint.tombstones)),
    ]  # fmt: skip
    whole = bytes(disk.names.now.files[path_of(file)].cache.data)
    for part in checkpoint.ledgers:
        rows = []
        for extent in part.extents:
            for number in range(blocks_of(extent.entries)):
                at, count = block_span(extent.start, extent.entries, number)
                ids, offsets, sizes = at + 8, at + 8 + 8 * count, at + 8 + 12 * count
                for row in range(count):
                    offset = whole[offsets + 4 * row :][:4]
                    place = pack(">Q", file << 40 | int.from_bytes(offset, "big"))
                    rows.append((whole[ids + 8 * row :][:8], place, whole[sizes + 4 * row :][:4]))
        first, last = (int.from_bytes(rows[at][0], "big") if rows else 0 for at in (0, -1))
        run = len(rows) if last - first + 1 == len(rows) else 0
        key, lac = part.key, part.explicit_lac
        parts += (
            pack(">qBqHH", part.ledger, part.flags, part.lac, len(key), len(lac)),
            pack(">qIIq", first if run else 0, run, len(rows) - run, part.live_bytes), key, lac,
            *(place for _, place, _ in rows[:run]), *(size for _, _, size in rows[:run]),
            *(b"".join(row) for row in rows[run:]),
        )  # fmt: skip
    rest = b"".join(parts)
    data = b"kvs-indx" + pack(">II", 2, crc32c(rest)) + rest
    disk.names.now.files[path_of(file)].cache.resize(len(data))
    disk.overwrite(path_of(file), 0, data)


def test_start_takes_over_directories_of_a_former_version(world: SimWorld) -> None:
    async def scenario() -> dict[int, int]:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await filled(shelf, 60, L, 8)
        for entry in range(0, 60, 3):
            assert await shelf.add(L, entry, payload_of(L, entry), recovery=True) is Status.OK
        await shelf.status(8, fence=True)
        await filled(shelf, 1, 9)
        return {file: each.live_bytes for file, each in shelf.storage.inventory.segments.items() if each.live}

    live = run(world, scenario())
    crash(world, power=False)
    disk = world.node("b1").disk
    for path in index_files(disk):
        as_format_2(disk, int(path[-14:-6]))
    oplog = OpLog(disk)

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await check(shelf, 60, L, 8)
        assert await shelf.add(8, 60) is Status.FENCED
        assert {file: shelf.storage.inventory.segments[file].live_bytes for file in live} == live
        await pause(1)
        assert in_memory(shelf) < 20
        assert statistics(shelf) == (0, 0)
        assert all_whole(shelf.storage.inventory)
        for path in index_files(disk):
            assert table_span(bytes(disk.names.now.files[path].cache.data)[:HEADER_SIZE]) is not None

    run(world, again())
    for number, image in enumerate(crash_images(oplog, 40, Random(1))):
        world.node(f"image{number}").disk = image.disk

        async def read(node: str = f"image{number}") -> None:
            shelf = await Shelf(world.env(node), CONFIG).start()
            await check(shelf, 60, L, 8)
            assert await shelf.add(8, 60) is Status.FENCED

        run(world, read(), f"image{number}")


def test_start_without_any_index_holds_one_segments_entries_at_a_time(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await filled(shelf, 120, L)

    run(world, scenario())
    crash(world, power=False)
    disk = world.node("b1").disk
    for path in index_files(disk):
        disk.remove(path)
    held = []
    original = Inventory.close

    def close(self: Inventory, *arguments: object) -> object:
        held.append(self.index_files.in_memory)
        return original(self, *arguments)  # type: ignore[arg-type]

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        assert len(held) > 8
        assert max(held) == 0, "each was on the disk before the next one was read"
        await check(shelf, 120, L)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inventory, "close", close)
        run(world, again())


def test_index_takeover_on_a_full_disk_leaves_the_reserve(world: SimWorld) -> None:
    """The files become larger. Their entries stay in memory until there is space (docs/protocol.md, B20 and B31)."""
    config = tiny(segment_bytes=16 << 10, reserve_bytes=32 << 10)
    disk, stored = world.node("b1").disk, 0

    async def fill() -> None:
        nonlocal stored
        disk.set_capacity(600 << 10)
        shelf = await Shelf(world.env("b1"), config).start()
        while await shelf.add(L, stored, b"x") is Status.OK:
            stored += 1
        await pause(3)

    async def judge() -> None:
        shelf = await Shelf(world.env("b1"), config).start()
        assert sum(disk.open(path).size() for path in index_files(disk)) == before
        assert await shelf.status(L, stored) is Status.NO_ENTRY
        assert [await shelf.status(L, entry) for entry in range(stored)] == [Status.OK] * stored
        for ledger in range(1000, 1020):
            assert await shelf.status(ledger, fence=True) is Status.NO_ENTRY
        disk.set_capacity(1 << 40)
        await pause(2 * POLL_S)
        for entry in range(stored, stored + 400):
            assert await shelf.add(L, entry) is Status.OK
        await pause(2)
        assert statistics(shelf)[0] == 0, "there is room again"

    run(world, fill())
    crash(world, power=False)
    for path in index_files(disk):
        as_format_2(disk, int(path[-14:-6]))
    before = sum(disk.names.now.files[path].cache.size for path in index_files(disk))
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + (30 << 10))
    run(world, judge())


@in_world
async def test_index_files_take_no_space_reserved_for_a_start(world: SimWorld) -> None:
    """Fences use up the reserve, and each segment that they fill has an index file (docs/protocol.md, B20)."""
    large = 16 << 10
    config, disk = tiny(segment_bytes=large, reserve_bytes=2 * large), world.node("b1").disk
    disk.set_capacity(600 << 10)
    shelf = await Shelf(world.env("b1"), config).start()
    entry, fenced = 0, 0
    while await shelf.add(L, entry, b"x") is Status.OK:
        entry += 1
    while await shelf.status(1000 + fenced, fence=True) is Status.NO_ENTRY:
        fenced += 1
    await pause(3)
    assert disk.free_bytes() >= start_bytes(large)
