"""Prepares a bookie's directories, once they are read back, for serving."""

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
from kvstore.os_errors import is_no_room

log = logging.getLogger(__name__)

SHARES = (1, 1, 4, 16, 64, 1024)
"""Of a segment's size: what is tried for the first one, if there is no room for more."""


def make_directory(disk: Disk, path: str) -> None:
    """Make a directory and its parents so that they are there after a power cut too."""
    disk.mkdir(path)
    if path.startswith("/"):
        disk.sync_dir(path)
        return  # what is above is the operator's
    parts = path.split("/")
    for count in range(len(parts)):
        disk.sync_dir("/".join(parts[:count]))


def write_again(
    found: Replayed, config: BookieConfig, journal: Journal, store_again: Callable[[Ledger, int, bytes], None]
) -> None:
    """Open the journal with what may not be synced, in one group: until that is on the disk as a whole, the former
    segments hold what they held. Raises OSError."""
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
def end_no_doubt(found: Replayed) -> None:
    """Leave out of what is written again that a former doubt has ended: this one began after it."""
    found.again = [
        each for each in found.again if not (each.head.kind == RecordKind.LIMBO and each.head.flags & CLEARED)
    ]


# docs/protocol.md B7
def doubt_again(found: Replayed, facts: Facts) -> None:
    """Put in limbo too, while that is everybody's, the ledgers of what was written again: they may not have been known
    when it began, or their admissions stood there. Raises JournalFull."""
    if not found.inventory.is_limbo:
        return
    for ledger in sorted({record.head.ledger for record in found.again} & found.inventory.ledgers.keys()):
        facts.set_limbo(found.inventory.ledgers[ledger], True)


# docs/protocol.md B9
def let_go_of_empty(found: Replayed, journal: Journal) -> None:
    """Say that segments are not needed in which nothing was ever noted of a ledger: what starts leave that were the
    last thing that happened. Else each of many takes a little of a full disk, until none is possible. Raises
    JournalFull."""
    for segment in _empty(found, but=journal.open_group.segment):
        journal.append(RecordKind.REMOVED, 0, -1, segment.file, b"", use=Use.FACT)
        found.inventory.remove(segment)
        found.leftovers.append(segment)


def _empty(found: Replayed, but: Segment | None = None) -> list[Segment]:
    """None where anything is in doubt: what cannot be read may have been noted there."""
    if found.damage or found.inventory.is_limbo:
        return []
    return [each for _, each in sorted(found.inventory.segments.items()) if not each.touched and each is not but]


def _open(found: Replayed, journal: Journal, size: int) -> None:
    """On a full disk the former segments first give back what was never written in them, and a smaller one will do, so
    that reads, fences and recovery go on."""
    each = 128 if found.inventory.is_limbo else 64  # a note about its ledger may follow
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
            if not is_no_room(error) or share == SHARES[-1]:
                raise
            _give_back(found)
        else:
            return


def _give_back(found: Replayed) -> None:
    """Cut the former segments where what can be read ends; of one behind the anchor whose header a crash has left out
    that is its beginning."""
    headless = {each: 0 for each in found.leftovers if each.file > found.synced[0] and each not in found.ends}
    for segment, end in (found.ends | headless).items():
        segment.cut(end)
        segment.release()  # of one that is not counted nobody else closes the file


def tidy(found: Replayed, disk: Disk, config: BookieConfig) -> None:
    """The new segment is on the disk and known to be: what it replaces may go. Raises OSError."""
    for segment in found.leftovers:
        segment.remove()
        remove_checkpoint(disk, config.index_dir, segment.file)  # a crash came before this did
    for segment in found.unreadable:
        try:
            segment.set_aside()
        except OSError as error:  # not even its name can be changed: it stays where nobody reads it any more
            log.error("%s cannot be set aside: %s", segment.path, error)
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
    """Let the newest checkpoint name the segment that this start has begun: the records of its own segment do not."""
    if checkpoint.file == files[-2]:
        checkpoint.files = files
    return checkpoint
