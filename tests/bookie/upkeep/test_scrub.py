"""The scrub finds damage before a reader does, reports it, and keeps its rate."""

from __future__ import annotations

import pytest

from kvstore.bookie.upkeep.scrub import Scrubber
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Metadata, in_world, segments, tiny
from tests.bookie.upkeep.test_reclaim import GONE, KEPT, fill, meta, opened, payload_of
from tests.sim.world.env import SimWorld

__all__ = ["meta"]


@in_world
async def test_scrub_finds_a_flipped_bit_before_a_reader_does(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf)
    scrubber = Scrubber(tiny(scrub_bytes_per_s=1 << 20), store.shelf.storage)
    assert await scrubber.round() == 0
    assert store.shelf.storage.statistics.scrubbed_bytes > 10_000
    disk = world.node("b1").disk
    content = bytes(disk.names.now.files[segments(disk)[2]].cache.data)
    entry = next(entry for entry in range(30) if payload_of(KEPT, entry) in content)
    disk.flip_bit(segments(disk)[2], 8 * (content.index(payload_of(KEPT, entry)) + 9))
    assert await scrubber.round() == 1
    assert list(scrubber.damaged) == [(KEPT, entry)]
    _, runs = await store.shelf.entries(KEPT)
    there = {first + at for first, count in runs for at in range(count)}
    assert there == set(range(30)) - {entry}, "leaders copy here what is not in the list (docs/protocol.md, B14)"
    assert await store.shelf.status(KEPT, entry) is Status.IO_ERROR, "it is present and must not be called absent"
    assert await store.shelf.add(KEPT, entry, payload_of(KEPT, entry), recovery=True) is Status.OK
    assert await store.shelf.payload(KEPT, entry) == payload_of(KEPT, entry)
    assert (await store.shelf.entries(KEPT))[1] == [(0, 30)]
    assert await scrubber.round() == 0


# docs/protocol.md B14
@in_world
async def test_damage_found_by_a_read_in_the_open_segment_survives_a_round(world: SimWorld, meta: Metadata) -> None:
    """The scrub skips that segment, so only this record keeps the entry out of the list."""
    store = await opened(world, meta)
    await fill(store.shelf)
    scrubber = Scrubber(tiny(scrub_bytes_per_s=1 << 20), store.shelf.storage)
    disk, path = world.node("b1").disk, store.shelf.storage.journal.open_group.segment.path
    content = bytes(disk.names.now.files[path].cache.data)
    entry = max(entry for entry in range(30) if payload_of(KEPT, entry) in content)
    bit = 8 * (content.index(payload_of(KEPT, entry)) + 9)
    disk.flip_bit(path, bit)
    assert await store.shelf.status(KEPT, entry) is Status.IO_ERROR
    assert await scrubber.round() == 0
    assert list(scrubber.damaged) == [(KEPT, entry)]
    _, runs = await store.shelf.entries(KEPT)
    assert {first + at for first, count in runs for at in range(count)} == set(range(30)) - {entry}
    for more in range(30, 90):  # the segment is full, and no longer the open one
        assert await store.shelf.add(GONE, more, payload_of(GONE, more)) is Status.OK
    assert await scrubber.round() == 1
    disk.flip_bit(path, bit)
    assert await scrubber.round() == 0
    assert list(scrubber.damaged) == [], "a readable entry is no longer damaged"


# docs/protocol.md A9
@in_world
async def test_scrub_reports_ledgers_that_may_lack_entries(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf, 3)
    scrubber, told = Scrubber(tiny(scrub_bytes_per_s=1 << 20), store.shelf.storage), []
    scrubber.on_damage = lambda ledgers: told.append(list(ledgers))
    await scrubber.round()
    assert told == []
    store.shelf.storage.facts.set_limbo(store.shelf.storage.inventory.ledgers[KEPT], True)
    await scrubber.round()
    assert told == [[KEPT]]


@in_world
async def test_scrub_keeps_its_rate(world: SimWorld, meta: Metadata) -> None:
    store = await opened(world, meta)
    await fill(store.shelf)
    scrubber = Scrubber(tiny(scrub_bytes_per_s=1000), store.shelf.storage)
    began = world.loop.time()
    await scrubber.round()
    read = store.shelf.storage.statistics.scrubbed_bytes
    assert world.loop.time() - began == pytest.approx(read / 1000)
