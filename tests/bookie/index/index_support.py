"""Bookies whose index files are inspected: on disk and in memory."""

from __future__ import annotations

from kvstore.bookie.index.blocks import block_span, blocks_of
from kvstore.bookie.index.checkpoints import checkpoint_path, read_checkpoint
from kvstore.bookie.inventory import Inventory
from kvstore.proto.bookkeeper import Status
from tests.bookie.support import Shelf, tiny
from tests.sim.world.disk import SimDisk
from tests.sim.world.pause import pause

L = 7
CONFIG = tiny()
LARGE = tiny(segment_bytes=1 << 18)
"""Large segments, each of which has several blocks of entries."""


def path_of(file: int) -> str:
    return checkpoint_path(CONFIG.index_dir, file)


def index_files(disk: SimDisk) -> list[str]:
    return [f"{CONFIG.index_dir}/{name}" for name in disk.list(CONFIG.index_dir) if name.endswith(".index")]


def payload_of(ledger: int, entry: int) -> bytes:
    return bytes([ledger, entry % 251]) * (60 + entry * 37 % 120)


async def filled(shelf: Shelf, count: int, *ledgers: int, first: int = 0) -> None:
    """Store this many entries of each ledger, and wait until nothing is in progress."""
    for entry in range(first, first + count):
        for ledger in ledgers:
            shelf.submit(ledger, entry, payload_of(ledger, entry), recovery=True)
        if entry % 7 == 0:
            await shelf.storage.synced()
    await shelf.storage.synced()
    await pause(1)


async def check(shelf: Shelf, count: int, *ledgers: int) -> None:
    for ledger in ledgers:
        for entry in range(count):
            assert await shelf.payload(ledger, entry) == payload_of(ledger, entry)
        assert await shelf.status(ledger, count) is Status.NO_ENTRY
        assert await shelf.entries(ledger) == (Status.OK, [(0, count)])


def in_memory(shelf: Shelf) -> int:
    """Return the number of entries whose places are in memory."""
    return sum(ledger.index.count for ledger in shelf.storage.inventory.ledgers.values())


def statistics(shelf: Shelf) -> tuple[int, int]:
    found = shelf.storage.refresh_statistics()
    return found.index_segments_in_memory, found.index_files_rebuilt


def damaged_block(disk: SimDisk, path: str, *, ledger: int = L) -> None:
    """Flip a bit in the first block of a ledger."""
    checkpoint = read_checkpoint(disk, CONFIG.index_dir, int(path[-14:-6]))
    assert checkpoint is not None
    (part,) = (part for part in checkpoint.ledgers if part.ledger == ledger)
    disk.flip_bit(path, 8 * (part.extents[0].start + 20))


def all_whole(inventory: Inventory) -> bool:
    """Return True if every block that lookups may read is on disk as it was written."""
    for segment in inventory.segments.values():
        for ledger, _ in inventory.sealed_in(segment):
            checkpoint = inventory.index_files.checkpoint(segment.file)
            if checkpoint is None:
                return False
            for extent in next(part.extents for part in checkpoint.ledgers if part.ledger == ledger):
                spans = [block_span(extent.start, extent.entries, each) for each in range(blocks_of(extent.entries))]
                if not all(inventory.index_files.block(segment.file, *span) for span in spans):
                    return False
    return True
