"""Deleted ledgers free their space, fences outlive them, and nothing that is needed is lost."""

from __future__ import annotations

from asyncio import gather
from random import Random
from typing import Any

import pytest

from kvstore.bookie.journal.record import RECORD_HEADER_SIZE, RecordKind
from kvstore.bookie.journal.reserve import JournalFull
from kvstore.bookie.upkeep.limbo import settle
from kvstore.bookie.upkeep.reclaim import Reclaimer
from kvstore.errors import MetadataUnavailable
from kvstore.proto.bookkeeper import Status
from kvstore.types import LedgerState
from tests.bookie.index.index_support import damaged_block, index_files
from tests.bookie.support import Metadata, Shelf, crash, in_world, lac_packet, metadata, run, segments, tiny
from tests.sim.world.env import SimWorld
from tests.sim.world.oplog import OpLog, crash_images
from tests.sim.world.pause import pause

KEPT, GONE, FENCED = 1, 2, 3


@pytest.fixture
def meta() -> Metadata:
    meta = Metadata()
    meta.known = {ledger: metadata(ledger) for ledger in (KEPT, GONE, FENCED)}
    return meta


class Store:
    """A storage with its reclaimer."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.reclaimer = Reclaimer(shelf.env, tiny(), shelf.storage, shelf.meta)


async def opened(world: SimWorld, meta: Metadata, node: str = "b1") -> Store:
    return Store(await Shelf(world.env(node), tiny(), meta).start())


def payload_of(ledger: int, entry: int) -> bytes:
    return bytes([ledger, entry]) * 100


async def fill(shelf: Shelf, count: int = 30) -> None:
    """Store three ledgers over several segments, and fence one of them at the end."""
    for entry in range(count):
        for ledger in (KEPT, GONE, FENCED):
            assert await shelf.add(ledger, entry, payload_of(ledger, entry)) is Status.OK
    await shelf.write_lac(KEPT, count - 1)
    await shelf.status(FENCED, fence=True)


def delete(meta: Metadata, *ledgers: int) -> None:
    for ledger in ledgers:
        meta.known[ledger] = None


async def check_kept(shelf: Shelf, count: int = 30) -> None:
    assert [await shelf.payload(KEPT, entry) for entry in range(count)] == [payload_of(KEPT, e) for e in range(count)]
    assert (await shelf.read_lac(KEPT))[1] == lac_packet(KEPT, count - 1)


def test_deleted_ledgers_free_their_space(world: SimWorld, meta: Metadata) -> None:
    async def scenario() -> None:
        store = await opened(world, meta)
        await fill(store.shelf)
        disk = world.node("b1").disk
        before = len(segments(disk))
        delete(meta, GONE, FENCED)
        assert await store.reclaimer.drop_deleted() == [GONE, FENCED]
        assert await store.shelf.status(GONE, 0) is Status.NO_LEDGER
        removed = await store.reclaimer.free_segments()
        assert len(removed) > 5
        assert len(segments(disk)) < before - 3
        await check_kept(store.shelf)

    async def again() -> None:
        store = await opened(world, meta)
        await check_kept(store.shelf)
        assert await store.shelf.status(GONE, 0) is Status.NO_LEDGER
        assert store.shelf.storage.statistics.damaged_records == 0

    run(world, scenario())
    for power in (True, False):
        crash(world, power=power)
        run(world, again())


@in_world
async def test_segment_with_a_sync_in_progress_is_not_taken_for_empty(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    journal = store.shelf.storage.journal
    assert await store.shelf.add(KEPT, 0, payload_of(KEPT, 0)) is Status.OK
    added = 1
    while journal.open_group.segment.file == journal.synced_file:
        store.shelf.submit(KEPT, added, payload_of(KEPT, added))
        added += 1
    assert await store.reclaimer.free_segments() == []
    await store.shelf.storage.synced()
    for entry in range(added):
        assert await store.shelf.payload(KEPT, entry) == payload_of(KEPT, entry)


@pytest.mark.parametrize("listed", [[], None])
@in_world
async def test_empty_or_failed_listing_deletes_nothing(world: SimWorld, meta: Metadata, listed: object) -> None:
    """A ledger that the list lacks is looked up separately."""
    store = await opened(world, meta)
    await fill(store.shelf)
    if listed is None:
        meta.fails_listing = True
        with pytest.raises(MetadataUnavailable):
            await store.reclaimer.drop_deleted()
    else:
        meta.listed = []
        assert await store.reclaimer.drop_deleted() == []
    assert await store.shelf.status(GONE, 0) is Status.OK


# docs/protocol.md B10
@in_world
async def test_failed_lookup_deletes_nothing(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf)
    meta.listed = []

    async def away(_: int) -> None:
        raise MetadataUnavailable("not connected")

    meta.metadata = away  # type: ignore[assignment, method-assign]
    with pytest.raises(MetadataUnavailable):
        await store.reclaimer.drop_deleted()
    assert await store.shelf.status(GONE, 0) is Status.OK


def test_late_add_to_a_deleted_ledger_is_refused_even_after_a_restart(world: SimWorld, meta: Metadata) -> None:
    async def drop() -> None:
        store = await opened(world, meta)
        await fill(store.shelf)
        delete(meta, GONE, FENCED)
        await store.reclaimer.drop_deleted()
        assert await store.shelf.add(FENCED, 30) is Status.FENCED
        assert await store.shelf.add(GONE, 30) is Status.FENCED
        await store.reclaimer.free_segments()

    async def late() -> None:
        shelf = (await opened(world, meta)).shelf
        meta.is_away = True
        assert await shelf.add(FENCED, 30) is Status.FENCED, "the tombstone needs nobody"
        assert await shelf.add(FENCED, 30, recovery=True) is Status.FENCED
        assert await shelf.add(GONE, 30) is Status.UNKNOWN_LEDGER_STATE
        meta.is_away = False
        assert await shelf.add(GONE, 30) is Status.FENCED
        assert await shelf.status(FENCED, 0, fence=True) is Status.NO_LEDGER

    run(world, drop())
    for power in (True, False, True):
        crash(world, power=power)
        run(world, late())


def test_tombstone_outlives_its_segment(world: SimWorld, meta: Metadata) -> None:
    async def churn(store: Store, first: int) -> None:
        for ledger in range(first, first + 6):
            meta.known[ledger] = metadata(ledger)
            for entry in range(12):
                await store.shelf.add(ledger, entry, b"x" * 300)
            delete(meta, ledger)
            await store.reclaimer.drop_deleted()
            await store.reclaimer.free_segments()

    async def scenario() -> None:
        store = await opened(world, meta)
        await fill(store.shelf, 3)
        delete(meta, FENCED)
        await store.reclaimer.drop_deleted()
        await churn(store, 100)
        assert segments(world.node("b1").disk)[0] > "bookie/journal/00000010"

    async def again(first: int) -> None:
        store = await opened(world, meta)
        meta.is_away = True
        assert await store.shelf.add(FENCED, 3) is Status.FENCED
        meta.is_away = False
        await check_kept(store.shelf, 3)
        await churn(store, first)

    run(world, scenario())
    for round in range(3):
        crash(world)
        run(world, again(200 + 100 * round))


# docs/protocol.md B10
def test_ledger_facts_outlive_the_only_segment_that_records_them(world: SimWorld, meta: Metadata) -> None:
    """Fences, last-add-confirmed, admissions and doubts, also of ledgers without entries."""
    doubted, empty = 4, 5
    meta.known |= {ledger: metadata(ledger) for ledger in (doubted, empty)}

    async def scenario() -> None:
        store = await opened(world, meta)
        shelf = store.shelf
        assert await shelf.add(FENCED, 0) is Status.OK
        for ledger in (FENCED, empty):
            await shelf.status(ledger, fence=True)
        assert await shelf.add(KEPT, 0) is Status.OK
        await shelf.write_lac(KEPT, 0)
        assert await shelf.add(doubted, 0) is Status.OK
        shelf.storage.facts.set_limbo(shelf.storage.inventory.ledgers[doubted], True)
        entry = 0
        while shelf.storage.journal.synced_file < 3:
            assert await shelf.add(GONE, entry, b"x" * 300) is Status.OK
            entry += 1
        delete(meta, GONE)
        await store.reclaimer.drop_deleted()
        assert 1 in await store.reclaimer.free_segments()

    async def again() -> None:
        shelf = (await opened(world, meta)).shelf
        meta.is_away = True
        assert [await shelf.add(ledger, 1) for ledger in (FENCED, empty)] == [Status.FENCED] * 2
        assert (await shelf.read_lac(KEPT))[1] == lac_packet(KEPT, 0)
        assert await shelf.add(KEPT, 1) is Status.OK, "nobody need be asked about it"
        assert await shelf.status(doubted, 1) is Status.UNKNOWN_LEDGER_STATE
        assert [await shelf.payload(ledger, 0) for ledger in (FENCED, KEPT, doubted)] == [b"hello"] * 3

    run(world, scenario())
    crash(world, power=False)
    run(world, again())


def test_dropped_ledger_stays_dropped_when_its_record_is_reclaimed(world: SimWorld, meta: Metadata) -> None:
    """Older segments still have its entries and the admission of its writer."""

    async def scenario() -> None:
        store = await opened(world, meta)
        for entry in range(12):
            await store.shelf.add(KEPT, entry, b"k" * 250)
            await store.shelf.add(GONE, entry, b"g" * 30)
        delete(meta, GONE)
        await store.reclaimer.drop_deleted()
        meta.known[50] = metadata(50)
        for entry in range(30):
            await store.shelf.add(50, entry, b"x" * 300)
        delete(meta, 50)
        await store.reclaimer.drop_deleted()
        assert await store.reclaimer.free_segments() != []

    async def again() -> None:
        store = await opened(world, meta)
        assert GONE not in store.shelf.storage.inventory.ledgers
        meta.is_away = True
        assert await store.shelf.add(GONE, 12) is Status.UNKNOWN_LEDGER_STATE

    run(world, scenario())
    crash(world)
    run(world, again())


# docs/protocol.md B10
@pytest.mark.parametrize("is_early", [True, False], ids=["before", "during"])
def test_ledger_created_again_gets_no_records_of_the_dropped_one(
    world: SimWorld, meta: Metadata, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The first segment has entries of the dropped ledger and stays, because most of it is live. The second one records
    the drop and is sparse. The ledger exists again before the second one is reclaimed, or from the middle of that."""

    async def scenario() -> None:
        store = await opened(world, meta)
        for entry in range(7):
            await store.shelf.add(KEPT, entry, b"k" * 340)
            await store.shelf.add(GONE, entry, b"g")
        delete(meta, GONE)
        assert await store.reclaimer.drop_deleted() == [GONE]
        meta.known[50] = metadata(50)
        for entry in range(30):
            await store.shelf.add(50, entry, b"x" * 300)
        delete(meta, 50)
        await store.reclaimer.drop_deleted()
        meta.known[GONE] = metadata(GONE)
        if is_early:
            assert await store.shelf.add(GONE, 0, b"new") is Status.OK
        rewrite = store.reclaimer._rewrite

        async def create_again(*given: Any) -> bool:
            assert await store.shelf.add(GONE, 0, b"new") is Status.OK
            return await rewrite(*given)

        monkeypatch.setattr(store.reclaimer, "_rewrite", create_again)
        first, second = list(store.shelf.storage.inventory.segments)[:2]
        removed = await store.reclaimer.free_segments()
        assert removed
        assert not {first, second} & set(removed)
        if is_early:
            assert store.shelf.storage.statistics.rewritten_bytes == 0, "a rewrite would free nothing"

    async def again() -> Store:
        store = await opened(world, meta)
        assert await store.shelf.payload(GONE, 0) == b"new"
        assert await store.shelf.entries(GONE) == (Status.OK, [(0, 1)])
        return store

    async def reclaim_both() -> None:
        store = await again()
        delete(meta, KEPT)
        await store.reclaimer.drop_deleted()
        assert (await store.reclaimer.free_segments())[:2] == [1, 2], "the older segment goes first"

    run(world, scenario())
    crash(world)
    run(world, reclaim_both())
    crash(world)
    run(world, again())


# docs/protocol.md B22
def test_start_counts_no_copies_that_a_removed_segment_had_replaced(
    world: SimWorld, meta: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the segments with these copies would not be sparse again until their ledgers are deleted."""
    live: dict[int, int] = {}

    async def scenario() -> None:
        store = await opened(world, meta)
        for lac in (0, 1):
            for entry in range(9):
                await store.shelf.add(KEPT, entry, b"k" * 340, lac=lac, recovery=True)
        for entry in range(30):
            await store.shelf.add(GONE, entry, b"g" * 340)
        delete(meta, GONE)
        await store.reclaimer.drop_deleted()
        sparse = store.reclaimer._sparse
        monkeypatch.setattr(store.reclaimer, "_sparse", lambda: [each for each in sparse() if each.file != 1])
        inventory = store.shelf.storage.inventory
        assert inventory.segments[1].live_bytes == 0
        assert 3 in await store.reclaimer.free_segments(), "it has newer copies of entries in the first two segments"
        for entry in range(9):
            await store.shelf.add(FENCED, entry, b"f" * 340)
        live.update({file: each.live_bytes for file, each in inventory.segments.items() if file < 3})
        assert list(live) == [1, 2]

    async def again() -> None:
        store = await opened(world, meta)
        there = store.shelf.storage.inventory.segments
        assert {file: each.live_bytes for file, each in there.items() if file < 3} == live
        assert 1 in await store.reclaimer.free_segments()

    run(world, scenario())
    crash(world)
    run(world, again())


# docs/protocol.md B10
@pytest.mark.parametrize("is_full", [True, False], ids=["checkpoint", "records"])
def test_drop_that_reclaim_writes_again_comes_before_the_later_ledger(
    world: SimWorld, meta: Metadata, is_full: bool
) -> None:
    """The first segment keeps records of the dropped ledger. The ledger is created again in the segment to which
    reclaim has written the drop."""

    async def scenario() -> None:
        store = await opened(world, meta)
        for entry in range(7):
            await store.shelf.add(KEPT, entry, b"k" * 340)
            await store.shelf.add(GONE, entry, b"g")
        delete(meta, GONE)
        await store.reclaimer.drop_deleted()
        for entry in range(7, 15):
            await store.shelf.add(FENCED, entry, b"x" * 340)
        delete(meta, FENCED)
        await store.reclaimer.drop_deleted()
        assert await store.reclaimer.free_segments() == [2]
        meta.known[GONE] = metadata(GONE)
        assert await store.shelf.add(GONE, 0, b"new") is Status.OK
        written = store.shelf.storage.journal.open_group.segment
        entry = 7
        while is_full and store.shelf.storage.journal.open_group.segment is written:
            entry += 1
            await store.shelf.add(KEPT, entry, b"k" * 340)

    async def again() -> None:
        store = await opened(world, meta)
        assert await store.shelf.payload(GONE, 0) == b"new"
        assert await store.shelf.entries(GONE) == (Status.OK, [(0, 1)])

    run(world, scenario())
    crash(world)
    run(world, again())


def test_crash_during_a_reclaim_loses_nothing(world: SimWorld, meta: Metadata, seed: int) -> None:
    logs: list[OpLog] = []

    async def scenario() -> None:
        store = await opened(world, meta)
        await fill(store.shelf, 12)
        await store.shelf.storage.synced()
        logs.append(OpLog(world.node("b1").disk))
        delete(meta, GONE, FENCED)
        await store.reclaimer.drop_deleted()
        await store.reclaimer.free_segments()
        await store.shelf.add(KEPT, 12, payload_of(KEPT, 12))

    run(world, scenario())
    for number, image in enumerate(crash_images(logs[0], 400, Random(seed))):
        node = f"image{number}"
        world.node(node).disk = image.disk

        async def again(node: str = node) -> None:
            store = await opened(world, meta, node)
            await check_kept(store.shelf, 12)
            assert await store.shelf.add(FENCED, 30) is Status.FENCED
            assert not store.shelf.storage.inventory.is_limbo
            assert store.shelf.storage.statistics.damaged_records == 0
            await store.reclaimer.drop_deleted()
            await store.reclaimer.free_segments()
            await check_kept(store.shelf, 12)

        try:
            run(world, again(), node)
        except BaseException as error:
            error.add_note(image.name)
            raise


def test_checkpoint_left_by_a_crash_is_removed_at_the_next_start(
    world: SimWorld, meta: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/protocol.md, B22: the size of the kept files is bounded by the size of the stored entries."""
    disk = world.node("b1").disk

    async def reclaim() -> None:
        store = await opened(world, meta)
        await fill(store.shelf)
        delete(meta, GONE)
        await store.reclaimer.drop_deleted()
        assert await store.reclaimer.free_segments()

    async def again() -> None:
        store = await opened(world, meta)
        assert not store.shelf.storage.inventory.is_limbo
        there = {name.partition(".")[0] for name in disk.list(tiny().journal_dir)}
        indexed = {name.partition(".")[0] for name in disk.list(tiny().index_dir)}
        assert indexed <= there

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.bookie.upkeep.reclaim.remove_checkpoint", lambda *_: None)
        run(world, reclaim())
    for _ in range(2):
        crash(world)
        run(world, again())


@in_world
async def test_entry_stored_again_during_a_rewrite_stays(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf)
    delete(meta, GONE, FENCED)
    await store.reclaimer.drop_deleted()
    work = world.env("b1").nursery.spawn(store.reclaimer.free_segments(), name="reclaim")
    for round in range(20):
        await pause(0.002)
        for entry in range(0, 30, 7):
            status = await store.shelf.add(KEPT, entry, payload_of(KEPT, entry), lac=round, recovery=True)
            assert status is Status.OK
    await work
    for entry in range(0, 30, 7):
        assert await store.shelf.payload(KEPT, entry) == payload_of(KEPT, entry)
        status, body, _ = await store.shelf.read(KEPT, entry)
        assert body is not None
        assert body[16:24] == (19).to_bytes(8, "big"), "the newest copy counts"


async def with_a_damaged_segment(world: SimWorld, meta: Metadata) -> Store:
    """Damage an entry that is kept, in the first segment; everything else there has been deleted."""
    store = await opened(world, meta)
    await fill(store.shelf)
    disk = world.node("b1").disk
    path = segments(disk)[0]
    content = bytes(disk.names.now.files[path].cache.data)
    disk.flip_bit(path, 8 * (content.index(payload_of(KEPT, 0)) + 3))
    delete(meta, GONE, FENCED)
    await store.reclaimer.drop_deleted()
    return store


@in_world
async def test_segment_with_a_damaged_entry_stays(world: SimWorld, meta: Metadata) -> None:
    store = await with_a_damaged_segment(world, meta)
    assert 1 not in await store.reclaimer.free_segments()
    assert await store.shelf.status(KEPT, 0) is Status.IO_ERROR
    assert await store.shelf.status(KEPT, 1) is Status.OK


@pytest.mark.parametrize("end", ["repaired", "deleted"])
@in_world
async def test_damaged_segment_is_removed_once_its_entries_are_replaced(
    world: SimWorld, meta: Metadata, end: str
) -> None:
    """Without a restart (docs/protocol.md, B22)."""
    store = await with_a_damaged_segment(world, meta)
    damaged = segments(world.node("b1").disk)[0]
    while freed := await store.reclaimer.free_segments():
        assert 1 not in freed
    rewritten = store.shelf.storage.statistics.rewritten_bytes
    assert await store.reclaimer.free_segments() == []
    assert store.shelf.storage.statistics.rewritten_bytes == rewritten, "not tried while nothing has changed"
    if end == "repaired":
        assert await store.shelf.add(KEPT, 0, payload_of(KEPT, 0), recovery=True) is Status.OK
    else:
        delete(meta, KEPT)
        await store.reclaimer.drop_deleted()
    assert 1 in await store.reclaimer.free_segments()
    assert damaged not in segments(world.node("b1").disk)
    if end == "repaired":
        await check_kept(store.shelf)


def test_segment_with_lost_places_stays_until_its_ledger_is_repaired(world: SimWorld, meta: Metadata) -> None:
    """The disk cannot read the segment while its damaged index is rebuilt, but may read it later (docs/protocol.md,
    B22)."""

    async def scenario() -> None:
        store = await opened(world, meta)
        await fill(store.shelf)
        await pause(1)
        disk = world.node("b1").disk
        damaged_block(disk, index_files(disk)[0], ledger=KEPT)
        disk.fail_reads(segments(disk)[0])
        assert await store.shelf.status(KEPT, 0) is Status.UNKNOWN_LEDGER_STATE
        delete(meta, GONE, FENCED)
        await store.reclaimer.drop_deleted()
        assert 1 not in await store.reclaimer.free_segments()
        disk.mend()

    async def again() -> None:
        store = await opened(world, meta)
        await check_kept(store.shelf)
        meta.known[KEPT] = metadata(KEPT, state=LedgerState.CLOSED, last_entry=29)
        assert await settle(store.shelf.storage, store.shelf.meta) == [KEPT]
        assert 1 in await store.reclaimer.free_segments()
        await check_kept(store.shelf)

    run(world, scenario())
    crash(world)
    run(world, again())


@pytest.mark.parametrize("payload_bytes", [20, 24_000])
@in_world
async def test_segment_is_rewritten_only_if_that_frees_space(
    world: SimWorld, meta: Metadata, payload_bytes: int
) -> None:
    """Otherwise entries that are smaller than their heads, or of which few fit into a segment, are rewritten for
    ever."""
    segment_bytes = 1 << 16
    config = tiny(sparse_share=0.8, segment_bytes=segment_bytes)
    shelf = await Shelf(world.env("b1"), config, meta).start()
    reclaimer = Reclaimer(shelf.env, config, shelf.storage, meta)
    count = 6 * segment_bytes // (payload_bytes + 68)
    for ledger in (KEPT, GONE):
        assert await shelf.add(ledger, 0, b"x" * payload_bytes) is Status.OK
    answers = [shelf.submit(of, entry, b"x" * payload_bytes) for entry in range(1, count) for of in (KEPT, GONE)]
    assert set(await gather(*answers)) == {Status.OK}
    for former in ([], [GONE]):
        delete(meta, *former)
        assert await reclaimer.drop_deleted() == former
        while await reclaimer.free_segments():
            assert shelf.storage.statistics.rewritten_bytes < 20 * segment_bytes
    assert await shelf.entries(KEPT) == (Status.OK, [(0, count)])
    total, free = shelf.storage.space()
    assert total - free < 12 * segment_bytes


@in_world
async def test_full_disk_becomes_writable_by_deleting_ledgers(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    world.node("b1").disk.set_capacity(10 * 4096)
    world.env("b1").nursery.spawn(store.reclaimer.run(), name="reclaim")
    entry = 0
    while await store.shelf.add(GONE, entry, b"x" * 300) is Status.OK:
        entry += 1
    assert store.shelf.storage.is_readonly
    assert await store.shelf.add(KEPT, 0) is Status.READ_ONLY
    delete(meta, GONE)
    await pause(20)
    assert not store.shelf.storage.is_readonly
    assert await store.shelf.add(KEPT, 0) is Status.OK


@in_world
async def test_drop_without_space_for_its_record_does_not_happen(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    disk = world.node("b1").disk
    disk.set_capacity(6 * 4096)
    entry = 0
    while await store.shelf.add(KEPT, entry, b"x", recovery=True) is Status.OK:
        entry += 1
    disk.set_capacity(6 * 4096 - disk.free_bytes())
    while store.shelf.storage.journal.bytes_left >= RECORD_HEADER_SIZE:
        store.shelf.storage.journal.append(RecordKind.LAC, 0, KEPT, 0, b"")
    with pytest.raises(JournalFull):
        store.reclaimer.drop(KEPT)
    assert await store.shelf.status(KEPT, 0) is Status.OK


@in_world
async def test_closed_ledgers_copy_is_kept_as_long_as_its_metadata(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf, 3)
    meta.known[GONE] = metadata(GONE, state=LedgerState.CLOSED, last_entry=2)
    assert await store.reclaimer.drop_deleted() == []


@in_world
async def test_copy_no_longer_named_is_kept_while_its_metadata_exists(world: SimWorld, meta: Metadata) -> None:
    """After a repair elsewhere: the copy takes space, and may be the last good one."""
    store = await opened(world, meta)
    await fill(store.shelf)
    delete(meta, FENCED)
    meta.known[GONE] = metadata(GONE, "b2-0", "b3-0", "b4-0", state=LedgerState.CLOSED, last_entry=29)
    assert await store.reclaimer.drop_deleted() == [FENCED]
    assert await store.reclaimer.free_segments() != []
    assert [await store.shelf.payload(GONE, entry) for entry in range(30)] == [payload_of(GONE, e) for e in range(30)]


@in_world
async def test_rewrite_keeps_its_rate(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf)
    delete(meta, GONE, FENCED)
    reclaimer = Reclaimer(store.shelf.env, tiny(rewrite_bytes_per_s=1000), store.shelf.storage, meta)
    await reclaimer.drop_deleted()
    began = world.loop.time()
    assert await reclaimer.free_segments() != []
    rewritten = store.shelf.storage.statistics.rewritten_bytes
    assert rewritten > 1000
    assert world.loop.time() - began == pytest.approx(rewritten / 1000, rel=0.1)


@in_world
async def test_waiting_reader_learns_that_a_ledger_is_gone(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await store.shelf.add(GONE, 0)
    poll = store.shelf.poll(GONE, 5, 50_000)
    delete(meta, GONE)
    await store.reclaimer.drop_deleted()
    assert poll.result() == (Status.NO_LEDGER, -1, None, -1)
