"""The size of a bookie's index on disk grows linearly with the stored bytes, not with their square (docs/protocol.md,
B22)."""

from __future__ import annotations

from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Shelf, crash, run, segments, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

L = 7
CONFIG = tiny()
PER_SEGMENT = 10


def index_bytes(disk: SimDisk) -> int:
    return sum(inode.cache.size for path, inode in disk.names.now.files.items() if path.startswith(CONFIG.index_dir))


async def fill(shelf: Shelf, disk: SimDisk, count: int) -> None:
    """Write until there are this many segments."""
    entry = shelf.storage.inventory.known(L).index.last + 1
    while len(segments(disk)) < count:
        assert await shelf.add(L, entry, b"x" * (4096 // PER_SEGMENT)) is Status.OK
        entry += 1
    await shelf.storage.synced()


def test_index_grows_with_the_disk_and_not_with_its_square(world: SimWorld) -> None:
    async def scenario() -> list[int]:
        shelf, disk = await Shelf(world.env("b1"), CONFIG).start(), world.node("b1").disk
        sizes = []
        for count in (100, 200, 400):
            await fill(shelf, disk, count)
            sizes.append(index_bytes(disk))
        return sizes

    one, two, four = run(world, scenario())
    assert (four - two) / (two - one) < 2.05, "twice as much for twice as many"
    assert four < 400 * 500, "a checkpoint of ten entries and one list"


def test_segment_list_exists_only_beside_the_newest_checkpoint(world: SimWorld) -> None:
    disk = world.node("b1").disk

    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await fill(shelf, disk, 20)
        await pause(1)  # the list is written once the checkpoint is on disk

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        assert not shelf.storage.inventory.is_limbo
        assert shelf.storage.statistics.damaged_records == 0
        for entry in range(shelf.storage.inventory.known(L).index.last + 1):
            assert await shelf.status(L, entry) is Status.OK
        await fill(shelf, disk, len(segments(disk)) + 3)
        await pause(1)

    run(world, scenario())
    for power in (True, False, True):
        lists = [name for name in disk.list(CONFIG.index_dir) if name.endswith(".files")]
        assert len(lists) == 1
        crash(world, power=power)
        run(world, again())
