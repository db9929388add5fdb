"""Prepares a bookie's directories to serve requests, after they were read back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.bookie.config import BookieConfig
from kvstore.bookie.facts import Facts
from kvstore.bookie.index.checkpoint import Checkpoint
from kvstore.bookie.index.checkpoints import remove_checkpoint
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import CLEARED, RECORD_HEADER_SIZE, RecordKind
from kvstore.bookie.journal.room import Use
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.replay import Replayed
from kvstore.env.ports import Disk
from kvstore.os_errors import is_no_space

log = logging.getLogger(__name__)

SHARES = (1, 1, 4, 16, 64, 1024)
"""Divisors of a segment's size, tried in order for the first segment if there is no space for a larger one."""


def make_directory(disk: Disk, path: str) -> None:
    """Create a directory and its parents durably, so that they survive a power failure."""
    disk.mkdir(path)
    if path.startswith("/"):
        disk.sync_dir(path)
        return  # the operator is responsible for the parents
    parts = path.split("/")
    for count in range(len(parts)):
        disk.sync_dir("/".join(parts[:count]))


def write_unsynced_again(
    found: Replayed, config: BookieConfig, journal: Journal, store_again: Callable[[Ledger, int, bytes], None]
) -> None:
    """Open the journal, and write the records that may not be synced again, in one group. The former segments keep
    their records until the whole group is on disk. Raises OSError."""
    _open(found, journal, config.segment_bytes)
    inventory = found.inventory
    for record in found.again:
        head = record.head
        if head.kind == RecordKind.ADD:
            store_again(inventory.known(head.ledger), head.entry, record.body)
        else:
            journal.append(head.kind, head.flags, head.ledger, head.entry, record.body, use=Use.FACT)
            inventory.apply(journal.open_group.segment, head, record.body)


# docs/protocol.md B7
def drop_ends_of_doubts(found: Replayed) -> None:
    """Do not write records again that end an earlier doubt, because the current doubt began later."""
    found.again = [
        each for each in found.again if not (each.head.kind == RecordKind.LIMBO and each.head.flags & CLEARED)
    ]


# docs/protocol.md B7
def renew_doubts(found: Replayed, facts: Facts) -> None:
    """If all ledgers are in limbo, also put the ledgers of the records that were written again in limbo. They may not
    have been known when the doubt began, or their admissions may have been in these records. Raises JournalFull."""
    if not found.inventory.is_limbo:
        return
    for ledger in sorted({record.head.ledger for record in found.again} & found.inventory.ledgers.keys()):
        facts.set_limbo(found.inventory.ledgers[ledger], True)


# docs/protocol.md B9
def release_empty_segments(found: Replayed, journal: Journal) -> None:
    """Record that segments without any record of a ledger are not needed. A series of starts leaves such segments
    behind. Without this, each start takes some space of a full disk, until no start is possible. Raises JournalFull."""
    for segment in _empty(found, but=journal.open_group.segment):
        journal.append(RecordKind.REMOVED, 0, -1, segment.file, b"", use=Use.FACT)
        found.inventory.remove(segment)
        found.leftovers.append(segment)


def _empty(found: Replayed, but: Segment | None = None) -> list[Segment]:
    """Return the segments without any record of a ledger, except `but`. Return none if records may be missing, because
    unreadable records may have been in such a segment."""
    if found.damage or found.inventory.is_limbo:
        return []
    return [each for _, each in sorted(found.inventory.segments.items()) if not each.touched and each is not but]


def _open(found: Replayed, journal: Journal, size: int) -> None:
    """Open the journal. On a full disk, first release the unused space of the former segments and try smaller segments,
    so that reads, fences and recovery still work."""
    each = 128 if found.inventory.is_limbo else 64  # a record about its ledger may follow
    notes = RECORD_HEADER_SIZE * len(_empty(found))
    for share in SHARES:
        try:
            journal.open(
                file=found.next_file,
                group=found.next_group,
                synced=found.synced,
                is_limbo=found.inventory.is_limbo,
                room=notes + sum(len(record.body) + each for record in found.again),
                size=size // share,
            )
        except OSError as error:
            if not is_no_space(error) or share == SHARES[-1]:
                raise
            _give_back(found)
        else:
            return


def _give_back(found: Replayed) -> None:
    """Cut each former segment where its readable part ends. A segment after the anchor that has no header because of a
    crash is cut at its beginning."""
    headless = {each: 0 for each in found.leftovers if each.file > found.synced[0] and each not in found.ends}
    for segment, end in (found.ends | headless).items():
        segment.cut(end)
        segment.release()  # nobody else closes the file of a segment that is not counted


def tidy(found: Replayed, disk: Disk, config: BookieConfig) -> None:
    """Remove the files that the new segment replaces. The new segment must be on disk. Raises OSError."""
    for segment in found.leftovers:
        segment.remove()
        remove_checkpoint(disk, config.index_dir, segment.file)  # a crash came before it was removed
    for segment in found.unreadable:
        try:
            segment.set_aside()
        except OSError as error:  # even its name cannot be changed, so it stays, and nobody reads it any more
            log.error("segment cannot be set aside path=%s error=%s", segment.path, error)
    anchor = found.inventory.segments.get(found.synced[0])
    if anchor is not None:
        anchor.cut(anchor.end)
        anchor.capacity = anchor.end
    files = sorted(found.inventory.segments)
    for checkpoint in found.checkpoints:
        if checkpoint.file in files:
            found.inventory.index_files.write(_listing(checkpoint, files))
    if anchor is None and len(files) > 1:
        found.inventory.index_files.write_list(files[-2], files)
    disk.sync_dir(config.journal_dir)


# docs/protocol.md B22
def _listing(checkpoint: Checkpoint, files: list[int]) -> Checkpoint:
    """Add the segment that this start has begun to the newest checkpoint, whose own segment does not name it."""
    if checkpoint.file == files[-2]:
        checkpoint.files = files
    return checkpoint
