"""Entries in full segments are found by index files, which are always verified, and rebuilt when damaged
(docs/protocol.md, B31)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from errno import EIO
from random import Random

import pytest

from kvstore.bookie.index.blocks import BLOCK_ENTRIES
from kvstore.bookie.index.checkpoints import read_checkpoint
from kvstore.bookie.journal import scan
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.bookie.upkeep.scrub import Scrubber
from kvstore.env import Env
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import PAYLOAD_AT
from tests.bookie.index.index_support import (
    CONFIG,
    LARGE,
    L,
    all_whole,
    check,
    damaged_block,
    filled,
    in_memory,
    index_files,
    path_of,
    payload_of,
    statistics,
)
from tests.bookie.support import Metadata, Shelf, crash, in_world, metadata, packet, run, segments, tiny
from tests.sim.world.disk import SimDisk, SimFile
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

# Entries in memory


def test_only_entries_of_the_open_segment_are_in_memory(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), LARGE).start()
        await filled(shelf, 3000, L)
        assert len(segments(world.node("b1").disk)) > 4
        assert in_memory(shelf) < 1000
        assert statistics(shelf) == (0, 0)
        await check(shelf, 3000, L)

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), LARGE).start()
        await pause(1)
        assert in_memory(shelf) < 1000
        assert statistics(shelf) == (0, 0)
        await check(shelf, 3000, L)

    run(world, scenario())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


@pytest.mark.parametrize("step", [1, 3])
@in_world
async def test_sealed_entry_takes_a_fraction_of_a_byte_of_memory(world: SimWorld, step: int) -> None:
    shelf = await Shelf(world.env("b1"), tiny(segment_bytes=1 << 20)).start()
    inventory = shelf.storage.inventory
    for entry in range(0, 40_000 * step, step):
        answer = shelf.submit(L, entry, b"")
        if entry % 1000 == 0:
            assert await answer is Status.OK
    await pause(1)
    sealed = inventory.ledgers[L].sealed
    assert sealed is not None
    fences = sum(len(each) for each in sealed._fences.values())
    rows = [sealed._firsts, sealed._lasts, sealed._high, sealed._counts, sealed._files, sealed._starts]
    assert sum(8 * len(row) for row in rows) + 8 * fences < 0.1 * 40_000
    assert (fences > 0) == (step > 1)
    for entry in range(0, 40_000 * step, 97):
        assert await shelf.status(L, entry) is (Status.NO_ENTRY if entry % step else Status.OK)


@in_world
async def test_old_entry_costs_one_index_read_and_a_new_one_none(world: SimWorld) -> None:
    shelf = await Shelf(world.env("b1"), LARGE).start()
    await filled(shelf, 2000, L)
    files = shelf.storage.inventory.index_files
    for entry in (0, 700, 1999):
        before = files.blocks_read
        await shelf.payload(L, entry)
        assert files.blocks_read - before == (entry < 1999)
    before = files.blocks_read
    for entry in range(700, 700 + BLOCK_ENTRIES // 2):
        await shelf.payload(L, entry)
    assert files.blocks_read - before <= 1, "neighbouring entries are in the same block"
    before = files.blocks_read
    for entry in range(2000, 2400):
        assert await shelf.add(L, entry) is Status.OK
    assert files.blocks_read == before, "adds look nothing up"


class Refusing:
    """A disk that rejects index files while that is requested."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.refuses = False

    def open(self, path: str, *, create: bool = False) -> SimFile:
        if self.refuses and create and path.startswith(CONFIG.index_dir):
            raise OSError(EIO, "the index's disk takes nothing")
        return self._disk.open(path, create=create)

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)


def refusing(world: SimWorld) -> tuple[Env, Refusing]:
    disk = Refusing(world.node("b1").disk)
    return replace(world.env("b1"), disk=disk), disk  # type: ignore[arg-type]


@in_world
async def test_entries_stay_in_memory_until_their_file_is_on_disk(world: SimWorld) -> None:
    env, disk = refusing(world)
    shelf = await Shelf(env, CONFIG).start()
    disk.refuses = True
    await filled(shelf, 60, L)
    held, rebuilt = statistics(shelf)
    assert (held > 3, rebuilt) == (True, 0)
    await check(shelf, 60, L)
    assert statistics(shelf)[1] == 0, "they were answered from memory"
    disk.refuses = False
    await filled(shelf, 30, L, first=60)
    assert statistics(shelf) == (0, 0), "those that were refused are written with the next one"
    await check(shelf, 90, L)
    assert all_whole(shelf.storage.inventory)


@in_world
async def test_index_file_is_not_read_before_it_is_synced(world: SimWorld) -> None:
    shelf = await Shelf(world.env("b1"), CONFIG).start()
    await filled(shelf, 12, L)
    disk, files = world.node("b1").disk, shelf.storage.inventory.index_files
    seen = 0
    for entry in range(12, 80):
        shelf.submit(L, entry, payload_of(L, entry))
    for _ in range(400):
        await pause(0.0001)
        unsynced = [path for path in disk.names.now.files if path.endswith(".index.new")]
        seen += bool(unsynced)
        for path in unsynced:
            assert files.is_held(int(path[-18:-10]))
    assert seen > 3
    assert await shelf.payload(L, 70) == payload_of(L, 70)


# Copies


@pytest.mark.parametrize("turn", range(12))
def test_newest_copy_counts_wherever_the_others_are(world: SimWorld, turn: int, seed: int) -> None:
    """Sequential adds, entries stored again, distant entries, crashes, index files damaged or missing; compared with a
    dict."""
    random, model = Random(seed * 100 + turn), dict[tuple[int, int], bytes]()
    next_entry = {ledger: random.choice([0, 5, 1 << 40]) for ledger in (1, 2, 3)}

    async def life() -> None:
        shelf = await Shelf(world.env("b1"), tiny(segment_bytes=random.choice([2048, 1 << 14]))).start()
        await judge(shelf)
        for _ in range(250):
            ledger, known = random.choice([1, 2, 3]), [entry for of, entry in model if of == 1]
            if random.random() < 0.7 or not known:
                entry = next_entry[ledger]
                next_entry[ledger] += random.choice([1, 1, 1, 1, 2, 3, 6000])
                body, lac = random.randbytes(random.choice([0, 40, 300])), -1
            else:
                ledger, entry = 1, random.choice(known)
                body, lac = model[ledger, entry][PAYLOAD_AT:], random.randrange(1000)
            assert await shelf.add(ledger, entry, body, recovery=True, lac=lac) is Status.OK
            model[ledger, entry] = packet(ledger, entry, body, lac)
            if random.random() < 0.01:
                await judge(shelf)
        await judge(shelf)

    async def judge(shelf: Shelf) -> None:
        await shelf.storage.synced()
        for (ledger, entry), body in model.items():
            assert (await shelf.read(ledger, entry))[:2] == (Status.OK, body)
        for ledger in {of for of, _ in model}:
            there = sorted(entry for of, entry in model if of == ledger)
            runs = (await shelf.entries(ledger))[1]
            assert [entry for first, count in runs for entry in range(first, first + count)] == there
            assert (await shelf.read(ledger))[1] == model[ledger, there[-1]]
            for entry in range(there[0], there[0] + 40):
                if entry not in there:
                    assert await shelf.status(ledger, entry) is Status.NO_ENTRY
        live = {file: each.live_bytes for file, each in shelf.storage.inventory.segments.items()}
        assert all(size >= 0 for size in live.values())
        counted = dict.fromkeys(live, 0)
        for ledger, entry in model:
            place, size = shelf.storage.inventory.ledgers[ledger].index.get(entry)
            counted[place >> 40] += size
        current = shelf.storage.journal.open_group.segment.file
        assert {file: size for file, size in live.items() if file != current} == {
            file: size for file, size in counted.items() if file != current
        }, "live bytes are exact, even across restarts"

    for _ in range(3):
        run(world, life())
        crash(world, power=random.random() < 0.5)
        disk = world.node("b1").disk
        for path in index_files(disk):
            match random.randrange(6):
                case 0:
                    disk.flip_bit(path, random.randrange(8 * disk.names.now.files[path].cache.size))
                case 1:
                    disk.remove(path)


def test_deleted_ledgers_entries_are_not_served_to_one_of_the_same_id(world: SimWorld) -> None:
    """Also not after a start, or when the index file is rebuilt from the segment, which still has them."""
    meta = Metadata()
    meta.known = {L: metadata(L), 8: metadata(8)}

    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG, meta).start()
        await filled(shelf, 30, L, 8)
        Reclaimer(shelf.env, CONFIG, shelf.storage, meta).drop(L)
        assert await shelf.status(L, 3) is Status.NO_LEDGER
        assert await shelf.add(L, 100, recovery=True) is Status.OK
        await filled(shelf, 20, 8, first=30)
        await judge(shelf)

    async def judge(shelf: Shelf) -> None:
        assert {await shelf.status(L, entry) for entry in range(30)} == {Status.NO_ENTRY}
        assert await shelf.entries(L) == (Status.OK, [(100, 1)])
        await check(shelf, 50, 8)

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG, meta).start()
        await judge(shelf)
        for path in index_files(world.node("b1").disk):
            checkpoint = read_checkpoint(world.node("b1").disk, CONFIG.index_dir, int(path[-14:-6]))
            if checkpoint is not None and any(part.ledger == 8 and part.extents for part in checkpoint.ledgers):
                damaged_block(world.node("b1").disk, path, ledger=8)
        shelf.storage.inventory.index_files._blocks.clear()
        await judge(shelf)
        assert statistics(shelf)[1] > 2
        await judge(shelf)

    run(world, scenario())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


@in_world
async def test_rebuilt_index_has_no_entries_dropped_before_the_segment_was_full(world: SimWorld) -> None:
    shelf = await Shelf(world.env("b1"), CONFIG).start()
    await filled(shelf, 3, L)
    Reclaimer(shelf.env, CONFIG, shelf.storage, shelf.meta).drop(L)
    assert await shelf.add(L, 100, recovery=True) is Status.OK
    await filled(shelf, 40, 8)
    assert shelf.storage.inventory.ledgers[L].index.get(100)[0] >> 40 == 1, "all in one segment"
    damaged_block(world.node("b1").disk, path_of(1), ledger=8)
    await check(shelf, 40, 8)
    assert statistics(shelf)[1] == 1
    assert await shelf.entries(L) == (Status.OK, [(100, 1)])
    assert [await shelf.status(L, entry) for entry in (0, 2, 99)] == [Status.NO_ENTRY] * 3


def test_reclaimed_segment_takes_its_index_file_along(world: SimWorld) -> None:
    meta = Metadata()
    meta.known = {L: metadata(L), 8: metadata(8)}

    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG, meta).start()
        await filled(shelf, 40, L, 8)
        meta.known[8] = None
        reclaimer = Reclaimer(shelf.env, CONFIG, shelf.storage, meta)
        assert await reclaimer.drop_deleted() == [8]
        removed = await reclaimer.free_segments()
        assert len(removed) > 2
        await pause(1)
        left = {int(path[-14:-6]) for path in index_files(world.node("b1").disk)}
        assert not left & set(removed)
        assert left <= set(shelf.storage.inventory.segments)
        await check(shelf, 40, L)
        assert statistics(shelf)[1] == 0, "nobody looks for an index that is gone"

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG, meta).start()
        await check(shelf, 40, L)

    run(world, scenario())
    crash(world)
    run(world, again())


# Damage


@in_world
async def test_other_work_continues_while_an_index_is_rebuilt(world: SimWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment may have more than 100,000 entries, whose rebuild takes seconds. Requests for them wait."""
    monkeypatch.setattr(scan, "STEP_RECORDS", 10)
    shelf = await Shelf(world.env("b1"), LARGE).start()
    await filled(shelf, 1000, L)
    await filled(shelf, 1, 8)
    inventory = shelf.storage.inventory
    (first, *_), disk = sorted(inventory.segments), world.node("b1").disk
    records = sum(sealed.count(first) for _, sealed in inventory.sealed_in(inventory.segments[first]))
    damaged_block(disk, path_of(first))
    inventory.index_files._blocks.clear()
    read, add = shelf.submit_read(L, 0), shelf.submit(L, 0, payload_of(L, 0), recovery=True)
    turns = 0
    while not (read.done() or add.done()):
        assert await shelf.payload(8, 0) == payload_of(8, 0)
        await asyncio.sleep(0)
        turns += 1
    assert turns > records / 10
    assert ((await read)[0], await add) == (Status.OK, Status.OK)


@in_world
async def test_request_whose_ledger_is_dropped_during_a_rebuild_finds_none(world: SimWorld) -> None:
    shelf = await Shelf(world.env("b1"), LARGE).start()
    await filled(shelf, 1000, L)
    inventory = shelf.storage.inventory
    damaged_block(world.node("b1").disk, path_of(min(inventory.segments)))
    inventory.index_files._blocks.clear()
    read = shelf.submit_read(L, 0)
    assert not read.done()
    inventory.drop(L, tombstone=False)
    assert (await read)[0] is Status.NO_LEDGER


@pytest.mark.parametrize("seen_by", ["reads", "scrub", "adds", "lists"])
@pytest.mark.parametrize("how", ["flip", "gone", "cut"])
def test_damaged_index_is_rebuilt_from_its_segment(world: SimWorld, how: str, seen_by: str) -> None:
    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        disk = world.node("b1").disk
        for entry in range(0, 80, 2):  # with holes, so that a list needs the blocks
            assert await shelf.add(L, entry, payload_of(L, entry)) is Status.OK
        await pause(1)
        for path in index_files(disk):
            if how == "flip":
                damaged_block(disk, path)
            elif how == "gone":
                disk.remove(path)
            else:
                disk.names.now.files[path].cache.resize(60)
        shelf.storage.inventory.index_files._blocks.clear()
        if seen_by == "scrub":
            assert await Scrubber(tiny(scrub_bytes_per_s=1 << 30), shelf.storage).round() == 0
        elif seen_by == "adds":
            for entry in range(0, 80, 2):
                assert await shelf.add(L, entry, payload_of(L, entry), recovery=True) is Status.OK
        elif seen_by == "lists":
            assert await shelf.entries(L) == (Status.OK, [(entry, 1) for entry in range(0, 80, 2)])
        for entry in range(80):
            want = Status.NO_ENTRY if entry % 2 else Status.OK
            assert await shelf.status(L, entry) is want
        await pause(1)
        held, rebuilt = statistics(shelf)
        assert rebuilt > 2
        if how == "flip":
            assert held == 0
            assert all_whole(shelf.storage.inventory)
        assert not shelf.storage.inventory.ledgers[L].is_limbo

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        for entry in range(80):
            assert await shelf.status(L, entry) is (Status.NO_ENTRY if entry % 2 else Status.OK)
        await pause(1)
        assert statistics(shelf) == (0, 0)
        assert all_whole(shelf.storage.inventory)

    run(world, scenario())
    crash(world)
    run(world, again())


def test_entry_lost_in_index_and_segment_is_unknown_not_absent(world: SimWorld) -> None:
    """And stays unknown across restarts, until it is stored here again."""

    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await filled(shelf, 80, L, 8)
        disk = world.node("b1").disk
        path, index = segments(disk)[1], index_files(disk)[1]
        disk.overwrite(path, 200, bytes(1500))
        damaged_block(disk, index)
        await judge(shelf)
        assert await shelf.status(8, 80) is Status.NO_ENTRY, "its blocks are intact"

    async def judge(shelf: Shelf) -> None:
        statuses = {await shelf.status(L, entry) for entry in range(81)}
        assert statuses - {Status.IO_ERROR} == {Status.OK, Status.UNKNOWN_LEDGER_STATE}
        assert shelf.storage.inventory.ledgers[L].is_limbo
        _, runs = await shelf.entries(L)
        there = {entry for first, count in runs for entry in range(first, first + count)}
        for entry in range(80):
            assert (entry in there) == (await shelf.status(L, entry) is Status.OK)

    async def again() -> None:
        await judge(await Shelf(world.env("b1"), CONFIG).start())

    run(world, scenario())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


@in_world
async def test_bad_sector_of_a_segment_hides_only_its_own_entries(world: SimWorld) -> None:
    """The rest of the segment is read around it when the index file is rebuilt."""
    shelf = await Shelf(world.env("b1"), LARGE).start()
    await filled(shelf, 3000, L)
    disk = world.node("b1").disk
    damaged_block(disk, index_files(disk)[0])
    disk.fail_reads(segments(disk)[0], range(200_000, 200_512))
    statuses = [await shelf.status(L, entry) for entry in range(3000)]
    assert set(statuses[:255]) == {Status.OK}, "those in the damaged block"
    assert Status.UNKNOWN_LEDGER_STATE not in statuses, "the others are found in their blocks"
    assert not shelf.storage.inventory.ledgers[L].is_limbo
    await pause(1)
    assert statistics(shelf) == (0, 1), "it is complete again"


@in_world
async def test_unreadable_segment_is_abandoned_soon(world: SimWorld) -> None:
    shelf = await Shelf(world.env("b1"), LARGE).start()
    await filled(shelf, 3000, L)
    disk = world.node("b1").disk
    damaged_block(disk, index_files(disk)[0])
    disk.fail_reads(segments(disk)[0])
    reads = []
    original = disk.check_readable
    disk.check_readable = lambda *where: (reads.append(where), original(*where))  # type: ignore[method-assign,func-returns-value]
    assert await shelf.status(L, 0) is Status.UNKNOWN_LEDGER_STATE
    assert len(reads) < 200


def test_index_of_another_segment_is_not_trusted(world: SimWorld) -> None:
    async def scenario() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await filled(shelf, 60, L)

    async def again() -> None:
        shelf = await Shelf(world.env("b1"), CONFIG).start()
        await check(shelf, 60, L)

    run(world, scenario())
    crash(world, power=False)
    disk = world.node("b1").disk
    one, two = index_files(disk)[1:3]
    data = bytes(disk.names.now.files[one].cache.data)
    disk.names.now.files[two].cache.resize(len(data))
    disk.overwrite(two, 0, data)
    run(world, again())
