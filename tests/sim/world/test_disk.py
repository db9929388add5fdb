"""The state of a disk after a crash. tests/env/test_disk.py tests all other behaviour of files and names, for real
disks too."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable
from random import Random

import pytest

from tests.sim.judges import probes
from tests.sim.world.disk import DiskConfig, Refusal, SimDisk, SimFile
from tests.sim.world.env import SimWorld
from tests.sim.world.inode import DROP_ALL, FATES, KEEP_ALL, SECTOR, TEAR_LAST, Content, Fate, Resize, Write, settle

pytestmark = pytest.mark.sim


def disk_with(data: bytes, seed: int = 1) -> tuple[SimDisk, SimFile]:
    """Return a disk with a file `f` whose content is durable."""
    disk = SimDisk(Random(seed))
    file = disk.open("f", create=True)
    file.pwrite(0, data)
    file.sync()
    disk.sync_dir("")
    return disk, file


def after_cut(disk: SimDisk, fate: Fate | None = None) -> bytes:
    disk.power_cut(fate)
    return disk.open("f").read(0, 1 << 20)


def outcomes(prepare: Callable[[SimDisk, SimFile], None], data: bytes, seeds: Iterable[int] = range(200)) -> set[bytes]:
    """Return all contents that a power cut may leave, over many seeds."""
    found = set()
    for seed in seeds:
        disk, file = disk_with(data, seed)
        prepare(disk, file)
        found.add(after_cut(disk))
    return found


# Writes


def test_synced_data_survives_any_fault() -> None:
    assert outcomes(lambda disk, file: None, b"a" * 2000) == {b"a" * 2000}


def test_unsynced_data_is_kept_dropped_or_torn_at_sectors() -> None:
    old, new = b"o" * 3 * SECTOR, b"n" * 3 * SECTOR
    found = outcomes(lambda disk, file: file.pwrite(0, new), old)
    sectors = [b"o" * SECTOR, b"n" * SECTOR]
    assert found == {a + b + c for a in sectors for b in sectors for c in sectors}


def test_unsynced_appends_may_leave_holes_and_any_length() -> None:
    def append(disk: SimDisk, file: SimFile) -> None:
        for number in range(3):
            file.pwrite(SECTOR * (1 + number), bytes([1 + number]) * SECTOR)

    found = outcomes(append, b"o" * SECTOR)
    kept = {tuple(data[start] for start in range(0, len(data), SECTOR)) for data in found}
    o = ord("o")
    assert {(o,), (o, 1), (o, 1, 2), (o, 1, 2, 3), (o, 0, 2), (o, 0, 0, 3), (o, 1, 0, 3)} <= kept


def test_sector_reaches_platter_with_all_its_earlier_writes() -> None:
    def overwrite(disk: SimDisk, file: SimFile) -> None:
        file.pwrite(0, b"1" * 10)
        file.pwrite(5, b"2" * 10)

    assert outcomes(overwrite, b"o" * 20) == {
        b"o" * 20,
        b"1" * 10 + b"o" * 10,
        b"1" * 5 + b"2" * 10 + b"o" * 5,
    }


def test_write_across_sectors_tears_at_sector_boundary() -> None:
    def overwrite(disk: SimDisk, file: SimFile) -> None:
        file.pwrite(SECTOR - 2, b"nnnn")

    old = b"o" * 2 * SECTOR
    found = outcomes(overwrite, old)
    assert {data[SECTOR - 2 : SECTOR + 2] for data in found} == {b"oooo", b"nnnn", b"nnoo", b"oonn"}
    assert all(len(data) == len(old) for data in found)


def test_preallocation_and_truncation_may_be_lost_too() -> None:
    assert {len(data) for data in outcomes(lambda disk, file: file.allocate(500), b"abc")} == {3, 500}
    assert outcomes(lambda disk, file: file.truncate(1), b"abc") == {b"abc", b"a"}


def test_fate_of_unsynced_writes_can_be_chosen() -> None:
    def cut(fate: Fate) -> bytes:
        disk, file = disk_with(b"o" * SECTOR)
        file.pwrite(SECTOR, b"1" * SECTOR)
        file.pwrite(2 * SECTOR, b"2" * SECTOR * 20)
        return after_cut(disk, fate)

    assert cut(DROP_ALL) == b"o" * SECTOR
    assert cut(KEEP_ALL) == b"o" * SECTOR + b"1" * SECTOR + b"2" * SECTOR * 20
    torn = cut(TEAR_LAST)
    assert torn.startswith(b"o" * SECTOR + b"1" * SECTOR)
    assert 0 < torn.count(b"2") < SECTOR * 20


def test_settling_never_invents_bytes() -> None:
    """Over random changes and fates, each byte was put there by some write, or is the old byte or zero."""
    for seed in range(300):
        luck = Random(seed)
        platter = Content(b"o" * 2000)
        changes: list[Write | Resize] = []
        for number in range(luck.randint(1, 8)):
            if luck.random() < 0.2:
                changes.append(Resize(luck.randint(0, 4000)))
            else:
                changes.append(Write(luck.randint(0, 3000), bytes([65 + number]) * luck.randint(1, 1500)))
        may_be = [{0, ord("o")} if at < 2000 else {0} for at in range(5000)]
        for change in changes:
            if isinstance(change, Write):
                for at in range(change.offset, change.offset + len(change.data)):
                    may_be[at].add(change.data[0])
        settle(platter, changes, luck.choice(FATES), luck)
        assert all(byte in may_be[at] for at, byte in enumerate(platter.read(0, 5000)))


# Syncs


def in_world(work: Callable[[SimWorld], object], **disk: object) -> SimWorld:
    with SimWorld(1, disk=DiskConfig(**disk)) as world:  # type: ignore[arg-type]

        async def act() -> None:
            result = work(world)
            if asyncio.iscoroutine(result):
                await result

        world.run(act())
    return world


def test_sync_covers_only_what_was_written_before_its_submission() -> None:
    async def work(world: SimWorld) -> None:
        disk = world.node("n").disk
        file = disk.open("f", create=True)
        disk.sync_dir("")
        done = asyncio.get_running_loop().create_future()
        file.pwrite(0, b"a" * SECTOR)
        file.submit_sync(done.set_result)
        file.pwrite(SECTOR, b"b" * SECTOR)
        assert await done is None
        assert file.read(0, 10_000) == b"a" * SECTOR + b"b" * SECTOR
        assert after_cut(disk, DROP_ALL) == b"a" * SECTOR

    in_world(work)


def test_sync_takes_time_and_covers_nothing_until_then() -> None:
    async def work(world: SimWorld) -> None:
        disk = world.node("n").disk
        file = disk.open("f", create=True)
        disk.sync_dir("")
        done: list[OSError | None] = []
        file.pwrite(0, b"x")
        file.submit_sync(done.append)
        await asyncio.sleep(0.4)
        assert done == []
        copy = disk.copy(Random(1))
        assert after_cut(copy, DROP_ALL) == b""
        await asyncio.sleep(0.7)
        assert done == [None]
        assert after_cut(disk, DROP_ALL) == b"x"

    in_world(work, sync_s=(0.5, 1.0), slow_chance=0)


def test_sync_of_crashed_process_is_never_reported_and_may_be_lost() -> None:
    kept = set()
    for seed in range(30):
        with SimWorld(seed) as world:
            node = world.node("n")

            async def main(env: object, node: object = node) -> None:
                disk = node.disk  # type: ignore[attr-defined]
                file = disk.open("f", create=True)
                disk.sync_dir("")
                file.pwrite(0, b"x")
                file.submit_sync(pytest.fail)
                await asyncio.Event().wait()

            node.start(main)

            async def act(world: SimWorld = world) -> None:
                await asyncio.sleep(0.00001)
                world.node("n").crash(power=True)
                await asyncio.sleep(1)

            world.run(act())
            kept.add(after_cut(node.disk))
    assert kept == {b"", b"x"}


def test_failed_sync_loses_its_pages_although_cache_still_shows_them() -> None:
    found = set()
    for seed in range(50):
        disk, file = disk_with(b"o" * SECTOR, seed)
        disk.fail_sync(2)
        file.pwrite(0, b"1" * SECTOR)
        file.sync()
        file.pwrite(0, b"2" * SECTOR)
        with pytest.raises(OSError, match="sync failed") as caught:
            file.sync()
        assert caught.value.errno == errno.EIO
        assert file.read(0, 1) == b"2"
        file.sync()
        disk.kill()
        assert disk.open("f").read(0, 1) == b"2", "a killed process finds the cache as it was"
        found.add(after_cut(disk)[:1])
    assert found == {b"1", b"2"}, "the next sync has succeeded without writing anything"


def test_syncs_can_be_slow_and_reads_can_fail() -> None:
    async def work(world: SimWorld) -> None:
        disk = world.node("n").disk
        file = disk.open("f", create=True)
        file.pwrite(0, bytes(100))
        disk.slow_syncs((1, 1))
        began = world.loop.time()
        done = asyncio.get_running_loop().create_future()
        file.submit_sync(done.set_result)
        await done
        assert world.loop.time() == began + 1
        disk.fail_reads("f", range(50, 60))
        assert file.read(0, 50) == bytes(50)
        assert file.read(60, 40) == bytes(40)
        with pytest.raises(OSError, match="cannot be read"):
            file.read(0, 51)
        disk.mend()
        assert file.read(0, 100) == bytes(100)

    in_world(work)


def test_damage_is_on_platter_and_in_cache() -> None:
    disk, file = disk_with(b"abc")
    assert disk.flip_bit("f", 8) == 8
    assert file.read(0, 3) == b"a" + bytes([ord("b") ^ 1]) + b"c"
    disk.overwrite("f", 1, b"XY")
    assert after_cut(disk) == b"aXY"
    assert 0 <= disk.flip_bit("f") < 24
    assert disk.open("f").read(0, 3) != b"aXY"


# Names


def names_after_cuts(prepare: Callable[[SimDisk], None], seeds: int = 100) -> set[tuple[str, ...]]:
    """Return names and contents that power cuts may leave, over many seeds."""
    found = set()
    for seed in range(seeds):
        disk = SimDisk(Random(seed))
        disk.mkdir("d")
        for name in ("a", "b"):
            file = disk.open(f"d/{name}", create=True)
            file.pwrite(0, name.encode())
            file.sync()
        disk.sync_dir("")
        disk.sync_dir("d")
        prepare(disk)
        disk.power_cut()
        found.add(tuple(f"{name}={disk.open(f'd/{name}').read(0, 9).decode()}" for name in disk.list("d")))
    return found


def test_new_file_may_vanish_until_its_directory_is_synced() -> None:
    def create(disk: SimDisk) -> None:
        file = disk.open("d/new", create=True)
        file.pwrite(0, b"new")
        file.sync()

    def create_and_sync(disk: SimDisk) -> None:
        create(disk)
        disk.sync_dir("d")

    assert names_after_cuts(create) == {("a=a", "b=b"), ("a=a", "b=b", "new=new")}
    assert names_after_cuts(create_and_sync) == {("a=a", "b=b", "new=new")}


def test_rename_is_atomic() -> None:
    assert names_after_cuts(lambda disk: disk.rename("d/a", "d/b")) == {("a=a", "b=b"), ("b=a",)}


def test_removed_file_may_come_back() -> None:
    assert names_after_cuts(lambda disk: disk.remove("d/a")) == {("a=a", "b=b"), ("b=b",)}


def test_changes_in_one_directory_survive_in_order() -> None:
    def change(disk: SimDisk) -> None:
        disk.rename("d/a", "d/c")
        disk.rename("d/b", "d/a")
        disk.remove("d/c")

    assert names_after_cuts(change) == {("a=a", "b=b"), ("b=b", "c=a"), ("a=b", "c=a"), ("a=b",)}


def test_syncing_one_directory_does_not_sync_another() -> None:
    def change(disk: SimDisk) -> None:
        disk.open("top", create=True)
        disk.remove("d/a")
        disk.sync_dir("")

    assert names_after_cuts(change) == {("a=a", "b=b"), ("b=b",)}


def test_unsynced_directory_loses_its_files_too() -> None:
    found = set()
    for seed in range(50):
        disk = SimDisk(Random(seed))
        disk.mkdir("new/deep")
        disk.open("new/deep/f", create=True).sync()
        disk.sync_dir("new/deep")
        disk.power_cut()
        found.add((disk.exists("new"), disk.exists("new/deep"), disk.exists("new/deep/f")))
    assert (False, False, False) in found
    assert (True, True, True) in found
    assert all(not there or above for above, _, there in found)


def test_sync_order_of_directory_and_parent_does_not_matter() -> None:
    for order in (("new", ""), ("", "new")):
        disk = SimDisk(Random(1))
        disk.mkdir("new")
        disk.open("new/f", create=True).sync()
        for path in order:
            disk.sync_dir(path)
        disk.power_cut(DROP_ALL)
        assert disk.exists("new/f")


def test_move_between_directories_is_durable_once_either_is_synced() -> None:
    for synced in ("", "d"):

        def move(disk: SimDisk, synced: str = synced) -> None:
            disk.rename("d/a", "a")
            disk.sync_dir(synced)

        assert names_after_cuts(move) == {("b=b",)}
    assert names_after_cuts(lambda disk: disk.rename("d/a", "a")) == {("a=a", "b=b"), ("b=b",)}


# Processes


def test_killed_process_loses_nothing_and_power_cut_loses_unsynced_data() -> None:
    disk, file = disk_with(b"old")
    file.pwrite(0, b"new")
    disk.kill()
    assert disk.open("f").read(0, 3) == b"new"
    assert after_cut(disk, DROP_ALL) == b"old"


def test_dead_process_cannot_touch_disk() -> None:
    """Code that runs after `fatal`, while the process ends, cannot touch the disk either."""
    with SimWorld(1) as world:
        node = world.node("n")

        async def main(env: object) -> None:
            file = node.disk.open("f", create=True)
            try:
                node.env.fatal("stop")
            finally:
                file.pwrite(0, b"written by the dead")

        async def act() -> None:
            node.start(main)
            await asyncio.sleep(1)
            assert world.fatals == [("n", "stop")]
            assert node.disk.open("f").size() == 0

        world.run(act())


def test_operation_fails_with_errno_until_refusal_is_removed() -> None:
    disk, file = disk_with(b"kept")
    disk.refusals.append(Refusal(errno.EDQUOT, frozenset({"pwrite", "create"}), "f"))
    with pytest.raises(OSError, match="quota") as refused:
        file.pwrite(0, b"lost")
    assert refused.value.errno == errno.EDQUOT
    with pytest.raises(OSError, match="quota"):
        disk.open("f2", create=True)
    disk.open("other", create=True)
    disk.refusals.clear()
    assert file.read(0, 4) == b"kept"
    file.pwrite(0, b"more")


def test_without_inodes_no_file_is_created_and_existing_files_grow() -> None:
    disk, file = disk_with(b"kept")
    disk.has_inodes = False
    assert disk.free_files() == 0
    with pytest.raises(OSError, match="inodes") as refused:
        disk.open("new", create=True)
    assert refused.value.errno == errno.ENOSPC
    file.pwrite(4, b"more")
    disk.mend()
    disk.open("new", create=True)


def test_disk_tests_have_taken_every_path_of_disk() -> None:
    disk, file = disk_with(b"abc")
    disk.set_capacity(3)
    with pytest.raises(OSError, match="no space"):
        file.pwrite(3, b"d")
    disk.mend()
    file.pwrite(3, b"d")
    disk.fail_sync()
    with pytest.raises(OSError, match="failed"):
        file.sync()
    file.pwrite(3, b"d")
    disk.open("g", create=True)
    disk.power_cut(DROP_ALL)
    assert probes.missed("disk.") == []
