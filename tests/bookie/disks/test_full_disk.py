"""A disk that was filled and freed accepts writes again without a restart (docs/protocol.md, B9 and B20)."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.bookie.journal.reserve import KEPT_MAX, Use, kept_bytes, leaves, start_bytes
from kvstore.bookie.journal.supply import POLL_S
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Metadata, Shelf, crash, in_world, metadata, run, segments, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.pause import pause

OLD, MORE, COPIES = 1, 2, 3
SEGMENT = 16 << 10


@pytest.fixture
def meta() -> Metadata:
    meta = Metadata()
    meta.known = {ledger: metadata(ledger) for ledger in (OLD, MORE, COPIES)}
    return meta


async def opened(world: SimWorld, meta: Metadata, *, reserve_bytes: int = 0) -> tuple[Shelf, Reclaimer]:
    config = tiny(segment_bytes=SEGMENT, reserve_bytes=reserve_bytes)
    shelf = await Shelf(world.env("b1"), config, meta).start()
    return shelf, Reclaimer(shelf.env, config, shelf.storage, meta)


async def add_all(shelf: Shelf, ledger: int, size: int = 300, *, first: int = 0, **how: bool) -> int:
    """Add entries until the disk is full. Return the first refused entry."""
    entry = first
    while (status := await shelf.add(ledger, entry, b"x" * size, **how)) is Status.OK:
        entry += 1
    assert status is Status.READ_ONLY
    return entry


@in_world
async def test_disk_filled_by_adds_and_copies_takes_fences_and_is_reclaimed(world: SimWorld, meta: Metadata) -> None:
    shelf, reclaimer = await opened(world, meta)
    world.node("b1").disk.set_capacity(6 * SEGMENT)
    await add_all(shelf, OLD)
    copied = await add_all(shelf, COPIES, recovery=True)
    await add_all(shelf, COPIES, 1, first=copied, recovery=True)
    assert copied, "recovery adds have more space than ordinary ones"
    for ledger in range(100, 110):
        assert await shelf.status(ledger, fence=True) is Status.NO_ENTRY, "a fence still has space"
    world.env("b1").nursery.spawn(reclaimer.run(), name="reclaim")
    meta.known[OLD] = None
    await pause(20)
    assert not shelf.storage.is_readonly
    assert await shelf.add(MORE, 0) is Status.OK
    assert [await shelf.status(COPIES, entry) for entry in range(copied)] == [Status.OK] * copied


@in_world
async def test_full_disk_of_sparse_segments_is_compacted(world: SimWorld, meta: Metadata) -> None:
    """No segment is empty: live entries must be rewritten before any space is freed."""
    shelf, reclaimer = await opened(world, meta)
    disk = world.node("b1").disk
    disk.set_capacity(8 * SEGMENT)
    entry = 0
    while await shelf.add(OLD, entry, b"x" * 900) is Status.OK:
        if entry % 12 == 0:
            await shelf.add(MORE, entry // 12, b"kept" * 20)
        entry += 1
    kept = (entry - 1) // 12
    await add_all(shelf, COPIES, 1, recovery=True)
    meta.known[OLD] = None
    await reclaimer.drop_deleted()
    assert len(await reclaimer.free_segments()) > 3
    assert not shelf.storage.is_readonly
    for each in range(kept):
        assert await shelf.payload(MORE, each) == b"kept" * 20


@in_world
async def test_fences_take_segments_from_the_reserve_when_needed(world: SimWorld, meta: Metadata) -> None:
    """Nothing else does, so that a bookie whose disk stays full can still fence."""
    shelf, _ = await opened(world, meta, reserve_bytes=4 * SEGMENT)
    disk = world.node("b1").disk
    disk.set_capacity(12 * SEGMENT)
    await add_all(shelf, OLD)
    for ledger in range(1000, 1400):
        assert await shelf.status(ledger, fence=True) is Status.NO_ENTRY
    free = disk.free_bytes()
    assert free < 4 * SEGMENT
    assert await shelf.add(COPIES, 0, recovery=True) is Status.READ_ONLY, "space taken for fences is only for fences"
    assert await shelf.add(MORE, 0) is Status.READ_ONLY
    assert disk.free_bytes() == free
    files = len(segments(disk, tiny(segment_bytes=SEGMENT)))
    disk.set_capacity(40 * SEGMENT)
    await pause(3)
    assert await shelf.add(MORE, 0) is Status.OK
    assert len(segments(disk)) == files + 1


@in_world
async def test_fence_uses_any_remaining_space(world: SimWorld, meta: Metadata) -> None:
    """Each fence that fails delays a recovery, and with it the next leader."""
    large = 4 * SEGMENT
    config = tiny(segment_bytes=large, reserve_bytes=2 * large)
    shelf = await Shelf(world.env("b1"), config, meta).start()
    disk = world.node("b1").disk
    disk.set_capacity(6 * large)
    await add_all(shelf, OLD)
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + kept_bytes(large) - 1)
    fenced = 0
    while await shelf.status(1000 + fenced, fence=True) is Status.NO_ENTRY:
        fenced += 1
    assert disk.free_bytes() < start_bytes(large) + 600, "no space for a fence is left"
    assert len(segments(disk)) < 20, "and not in one piece each"
    shelf.storage.stop()
    again = await Shelf(shelf.env, config, meta).start()
    for ledger in range(1000, 1000 + fenced):
        assert await again.add(ledger, 0) is Status.FENCED


@in_world
async def test_free_space_is_read_from_the_journals_disk(world: SimWorld, meta: Metadata) -> None:
    """It may be another disk than that of the data directory."""
    shelf, _ = await opened(world, meta, reserve_bytes=4 * SEGMENT)
    disk, journal_dir = world.node("b1").disk, tiny().journal_dir
    disk.set_capacity(12 * SEGMENT)
    await add_all(shelf, OLD)
    free_bytes = disk.free_bytes
    disk.free_bytes = lambda path="": free_bytes(path) if path == journal_dir else 0  # type: ignore[method-assign]
    for ledger in range(1000, 1400):
        assert await shelf.status(ledger, fence=True) is Status.NO_ENTRY


@in_world
async def test_add_refused_for_lack_of_space_leaves_nothing_behind(world: SimWorld, meta: Metadata) -> None:
    """Not even the key of its ledger, because writers retry repeatedly."""
    shelf, _ = await opened(world, meta)
    world.node("b1").disk.set_capacity(6 * SEGMENT)
    await add_all(shelf, OLD)
    bytes_left = shelf.storage.journal.bytes_left
    for ledger in range(100, 150):
        assert await shelf.add(ledger, 0) is Status.READ_ONLY
    assert shelf.storage.journal.bytes_left == bytes_left


@in_world
async def test_copy_refused_for_lack_of_space_leaves_nothing_behind(world: SimWorld, meta: Metadata) -> None:
    shelf, _ = await opened(world, meta)
    world.node("b1").disk.set_capacity(6 * SEGMENT)
    await add_all(shelf, OLD)
    await add_all(shelf, COPIES, 900, recovery=True)
    bytes_left = shelf.storage.journal.bytes_left
    assert bytes_left > leaves(Use.COPY, SEGMENT) + 100, "a key alone would fit"
    for ledger in range(100, 150):
        assert await shelf.add(ledger, 0, b"x" * 900, recovery=True) is Status.READ_ONLY
    assert shelf.storage.journal.bytes_left == bytes_left
    assert not shelf.storage.inventory.ledgers.keys() & set(range(100, 150))


def test_each_use_leaves_its_share_free() -> None:
    assert kept_bytes(64 << 20) == KEPT_MAX
    assert kept_bytes(SEGMENT) == SEGMENT // 8
    assert start_bytes(64 << 20) == 2 << 20
    assert [leaves(use, 64 << 20) for use in (Use.COPY, Use.REWRITE, Use.FACT)] == [KEPT_MAX, KEPT_MAX // 2, 0]


@pytest.mark.parametrize("size", range(60, 90))
@in_world
async def test_segment_never_outgrows_its_allocated_space(world: SimWorld, meta: Metadata, size: int) -> None:
    """On a disk without a free byte the journal would stop: fences would wait forever, and so would reclaim, which
    could free space."""
    shelf, _ = await opened(world, meta)
    disk = world.node("b1").disk
    paths, full = segments(disk), 0
    for entry in range(250):
        assert await shelf.add(OLD, entry, b"x" * size) is Status.OK
        if segments(disk) == paths:
            continue
        paths, full = segments(disk), full + 1
        disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes())
        assert all(disk.open(path).size() == SEGMENT for path in paths)
        async with asyncio.timeout(1):
            assert await shelf.status(1000 + entry, fence=True) is Status.NO_ENTRY
        disk.set_capacity(100 * SEGMENT)
        await pause(2)
        paths = segments(disk)
    assert full >= 2


# docs/protocol.md B9
@pytest.mark.parametrize("end", ["kill", "power cut", "stop"])
@pytest.mark.parametrize("rest_s", [0, 0.2])
def test_starts_never_use_up_a_full_disk(world: SimWorld, meta: Metadata, end: str, rest_s: float) -> None:
    """A node that fails to start for another reason is restarted every few seconds."""
    config, disk = tiny(segment_bytes=4 * SEGMENT, reserve_bytes=0), world.node("b1").disk

    async def life(found: list[int]) -> None:
        shelf = await Shelf(world.env("b1"), config, meta).start()
        found.append(disk.free_bytes())
        await pause(rest_s)
        if end == "stop":
            shelf.storage.stop()

    async def fill() -> int:
        shelf = await Shelf(world.env("b1"), config, meta).start()
        disk.set_capacity(10 * 4 * SEGMENT)
        return await add_all(shelf, OLD)

    async def last(count: int) -> None:
        shelf = await Shelf(world.env("b1"), config, meta).start()
        assert [await shelf.status(OLD, entry) for entry in range(count)] == [Status.OK] * count

    count = run(world, fill())
    crash(world)
    disk.set_capacity(disk.config.capacity_bytes - disk.free_bytes() + 20_000)
    found: list[int] = []
    for _ in range(30):
        run(world, life(found))
        crash(world, power=end == "power cut")
    assert min(found[5:]) == max(found[5:])
    run(world, last(count))


# docs/protocol.md B9
@in_world
async def test_disk_filled_by_others_into_the_reserve_takes_no_adds_until_freed(
    world: SimWorld, meta: Metadata
) -> None:
    shelf, _ = await opened(world, meta, reserve_bytes=4 * SEGMENT)
    disk, capacity = world.node("b1").disk, 40 * SEGMENT
    disk.set_capacity(capacity)
    assert await shelf.add(OLD, 0) is Status.OK
    taken = capacity - disk.free_bytes()

    async def look(free: int) -> bool:
        disk.set_capacity(taken + free)
        await pause(2 * POLL_S)
        assert shelf.storage.refresh_statistics().free_bytes == free
        return shelf.storage.is_readonly

    assert not await look(2 * SEGMENT), "half of the reserve: the segment ahead was made before"
    assert await look(2 * SEGMENT - 1)
    assert await shelf.add(OLD, 1) is Status.READ_ONLY
    assert await shelf.status(OLD, fence=True) is Status.OK, "the reserve is for this"
    assert await look(4 * SEGMENT - 1), "the state does not flip at each byte"
    assert not await look(4 * SEGMENT)
    assert await shelf.add(MORE, 0) is Status.OK
