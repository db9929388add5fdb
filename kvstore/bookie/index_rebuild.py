"""Makes a full segment's index file again that cannot be read as it was written: from the segment, which is the truth.

What the segment cannot tell either, because it is damaged too, is taken from those blocks of the file that are whole.
What is then still missing is unknown, never absent: its ledger comes into limbo (docs/protocol.md, B7 and B31).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.bookie.digests import is_same_entry
from kvstore.bookie.index.blocks import block_span, blocks_of, encode_extents, lay_out
from kvstore.bookie.index.checkpoint import HEADER_SIZE, Checkpoint, LedgerPart, with_table
from kvstore.bookie.index.entry_index import OFFSET_BITS, OFFSET_MASK, EntryIndex
from kvstore.bookie.index.index_files import RebuiltIndex
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.record import RecordKind
from kvstore.bookie.journal.scan import ScannedRecord, scan
from kvstore.bookie.journal.segment import Segment
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

FAILED_READS_MAX = 64
"""Of one segment: what then cannot be read either is not divided any further. Some three bad sectors in 64 MiB."""
_SECTOR = 4096
_FORGETS = (RecordKind.DROPPED, RecordKind.TOMBSTONE)


# docs/protocol.md B31
class IndexRebuilder:
    """Knows which entries a segment must have, by what is in memory of each ledger."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._index_files = inventory.index_files
        self.lost: set[int] = set()
        """Ledgers of which places of entries were lost."""
        self.on_lost: Callable[[int], None] = lambda _ledger: None
        """Told of each of them, when it is in limbo already, so that this is written down."""

    def rebuild(self, file: int) -> RebuiltIndex | None:
        """The entries of a segment. None if the segment is gone."""
        segment = self._inventory.segments.get(file)
        if segment is None:
            return None
        found = entries_in(segment)
        checkpoint = self._index_files.checkpoint(file)
        parts = {part.ledger: part for part in checkpoint.ledgers} if checkpoint is not None else {}
        lost = []
        for ledger, sealed in self._inventory.sealed_in(segment):
            entries, part = found.setdefault(ledger, EntryIndex()), parts.get(ledger)
            if part is not None and not _fits(part, entries):
                self._save(file, part, entries)
            if entries.count != sealed.count(file):
                lost.append(ledger)
        for ledger in lost:
            self._lose(ledger, file)
        is_whole = checkpoint is not None and not lost
        return RebuiltIndex(found, _made_again(checkpoint, found) if checkpoint is not None and is_whole else None)

    def _save(self, file: int, part: LedgerPart, entries: EntryIndex) -> None:
        """Take what the segment does not tell from the blocks that are whole."""
        for extent in part.extents:
            for number in range(blocks_of(extent.entries)):
                block = self._index_files.block(file, *block_span(extent.start, extent.entries, number))
                for entry, offset, size in zip(*block, strict=True) if block is not None else ():
                    if not entries.get(entry)[0]:
                        entries.put(entry, file << OFFSET_BITS | offset, size)

    def _lose(self, ledger: int, file: int) -> None:
        found = self._inventory.ledgers[ledger]
        log.error("ledger=%d segment=%d and its index are damaged: entries may be missing", ledger, file)
        found.is_limbo, found.is_admitted = True, False
        self.lost.add(ledger)
        self.on_lost(ledger)


def entries_in(segment: Segment) -> dict[int, EntryIndex]:
    """The entries of a full segment by its records, as they were when it was full, by ledger."""
    data = _read_what_can_be(segment)
    found: dict[int, EntryIndex] = {}
    for record in scan(data, segment.file, segment.salt, known_end=segment.end).records:
        head = record.head
        if head.kind == RecordKind.ADD:
            entries = found.setdefault(head.ledger, EntryIndex())
            if (former := entries.get(head.entry))[0] and not _may_replace(segment, former, record):
                continue
            entries.put(head.entry, segment.file << OFFSET_BITS | record.offset, head.size)
        elif head.kind in _FORGETS:
            found.pop(head.ledger, None)
    for entries in found.values():
        entries.compact()
    return found


# docs/protocol.md B36
def _may_replace(segment: Segment, former: tuple[int, int], record: ScannedRecord) -> bool:
    """Return True unless the entry's earlier record in the segment has a readable packet with another payload."""
    place, size = former
    held = segment.read_body(place & OFFSET_MASK, size, ledger=record.head.ledger, entry=record.head.entry)
    return held is None or (record.is_good and is_same_entry(held, record.body))


def _read_what_can_be(segment: Segment) -> bytes:
    """Return the segment's bytes, with zeroes where the disk gives none. Skip what is left if the disk fails again and
    again, because the event loop waits meanwhile. Raises OSError for an error that passes."""
    try:
        file = segment.handle
    except OSError as error:
        if is_passing(error):
            raise
        log.error("%s cannot be read: %s", segment.path, error)
        return b""
    parts, left, failed = list[bytes](), [(0, segment.end)], 0
    while left:
        at, size = left.pop()
        try:
            parts.append(file.read(at, size))
        except OSError as error:
            if is_passing(error):
                raise
            failed += 1
            if size > _SECTOR and failed < FAILED_READS_MAX:
                half = (size // 2 + _SECTOR - 1) // _SECTOR * _SECTOR
                left += ((at + half, size - half), (at, half))
                continue
            log.error("%s cannot be read from byte %d to %d: %s", segment.path, at, at + size, error)
            parts.append(bytes(size))
    return b"".join(parts)


def _fits(part: LedgerPart, entries: EntryIndex) -> bool:
    if not part.extents:
        return not entries.count
    return entries.count > 0 and lay_out(entries.ids(), part.extents[0].start) == part.extents


def _made_again(checkpoint: Checkpoint, found: dict[int, EntryIndex]) -> bytes:
    """The file as it was. The blocks of ledgers that were dropped since may be zeroes: nobody looks into them."""
    end = max((part.extents[-1].end for part in checkpoint.ledgers if part.extents), default=HEADER_SIZE)
    blocks = bytearray(end - HEADER_SIZE)
    for part in checkpoint.ledgers:
        entries = found.get(part.ledger)
        if part.extents and entries is not None and _fits(part, entries):
            data = encode_extents(entries.columns(), part.extents, checkpoint.salt)
            at = part.extents[0].start - HEADER_SIZE
            blocks[at : at + len(data)] = data
    return with_table(bytes(blocks), checkpoint)
