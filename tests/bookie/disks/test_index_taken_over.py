"""Index directories that a former build wrote, or that are lost, are made anew at the start (docs/protocol.md, B31)."""

from __future__ import annotations

from random import Random
from struct import pack

import pytest
from crc32c import crc32c

from kvstore.bookie.index.blocks import block_span, blocks_of
from kvstore.bookie.index.checkpoint import HEADER_SIZE, table_span
from kvstore.bookie.index.checkpoints import read_checkpoint
from kvstore.bookie.inventory import Inventory
from kvstore.proto.bookkeeper import Status
from tests.bookie.disks.index_support import (
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
from tests.bookie.support import Shelf, crash, run
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, crash_images
from tests.sim.world.pause import pause


def as_format_2(disk: SimDisk, file: int) -> None:
    """Put the checkpoint of a segment into the format that builds before this one wrote."""
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
        moved = []
        for extent in part.extents:
            for number in range(blocks_of(extent.entries)):
                at, count = block_span(extent.start, extent.entries, number)
                ids, offsets, sizes = at + 8, at + 8 + 8 * count, at + 8 + 12 * count
                for row in range(count):
                    offset = whole[offsets + 4 * row :][:4]
                    place = pack(">Q", file << 40 | int.from_bytes(offset, "big"))
                    moved.append(whole[ids + 8 * row :][:8] + place + whole[sizes + 4 * row :][:4])
        key, lac = part.key, part.explicit_lac
        parts += (
            pack(">qBqHH", part.ledger, part.flags, part.lac, len(key), len(lac)),
            pack(">qIIq", 0, 0, len(moved), part.live_bytes), key, lac, *moved,
        )  # fmt: skip
    rest = b"".join(parts)
    data = b"kvs-indx" + pack(">II", 2, crc32c(rest)) + rest
    disk.names.now.files[path_of(file)].cache.resize(len(data))
    disk.overwrite(path_of(file), 0, data)


def test_directories_of_a_former_build_are_taken_over_at_the_start(world: SimWorld) -> None:
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


def test_a_start_without_any_index_holds_one_segments_entries_at_a_time(world: SimWorld) -> None:
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
