"""What a bookie does to its directories between reading them back and serving."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.journal import Journal
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.record import Kind
from kvstore.bookie.replay import Replayed, write_checkpoint
from kvstore.env.ports import Disk


def make_directory(disk: Disk, path: str) -> None:
    """Make a directory and its parents so that they are there after a power cut too."""
    disk.mkdir(path)
    parts = path.split("/")
    for count in range(len(parts)):
        disk.sync_dir("/".join(parts[:count]))


def write_again(found: Replayed, journal: Journal, append_copy: Callable[[Ledger, int, bytes], None]) -> None:
    """Open the journal with what may not be synced, in one group: until that is on the disk as a whole, the former
    segments hold what they held. Raises OSError."""
    inventory = found.inventory
    journal.open(
        file=found.next_file,
        group=found.next_group,
        synced=found.synced,
        is_limbo=inventory.is_limbo,
        room=sum(len(record.body) + 64 for record in found.again),
    )
    for record in found.again:
        head = record.head
        if head.kind == Kind.ADD:
            append_copy(inventory.known(head.ledger), head.entry, record.body)
        else:
            journal.append(head.kind, head.flags, head.ledger, head.entry, record.body)
            inventory.apply(journal.open_group.segment, head, record.body)


def tidy(found: Replayed, disk: Disk, config: BookieConfig) -> None:
    """The new segment is on the disk and known to be: what it replaces may go. Raises OSError."""
    for segment in found.leftovers:
        segment.remove()
    for segment in found.unreadable:
        segment.set_aside()
    anchor = found.inventory.segments.get(found.synced[0])
    if anchor is not None:
        anchor.shrink()
    for checkpoint in found.checkpoints:
        write_checkpoint(disk, config.index_dir, checkpoint)
    disk.sync_dir(config.journal_dir)
