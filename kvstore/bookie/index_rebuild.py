"""Rebuilds the index file of a full segment if the file cannot be read as it was written. The segment is the truth.

If the segment is damaged too, its entries are taken from the intact blocks of the file. Entries that are still missing
are unknown, never absent: their ledgers enter limbo (docs/protocol.md, B7 and B31).
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
from kvstore.bookie.journal.scan import STEP_RECORDS, ScannedRecord, scan
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.steps import Steps
from kvstore.os_errors import is_passing

log = logging.getLogger(__name__)

FAILED_READS_MAX = 64
"""Maximum number of failed reads of one segment; the parts that fail after that are not divided any further. Enough for
about three bad sectors in 64 MiB."""
READ_BYTES = 1 << 20
"""Bytes of a segment that are read in one step."""
_SECTOR = 4096
_FORGETS = (RecordKind.DROPPED, RecordKind.TOMBSTONE)


# docs/protocol.md B31
class IndexRebuilder:
    """Rebuilds index files. It knows from the ledgers' state in memory which entries a segment must have."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._index_files = inventory.index_files
        self.lost: set[int] = set()
        """Ledgers that have entries whose places were lost."""
        self.on_lost: Callable[[int], None] = lambda _ledger: None
        """Called with each ledger in `lost`, after it has entered limbo, so that the limbo is recorded."""

    def rebuild(self, file: int) -> Steps[RebuiltIndex | None]:
        """Return the entries of a segment, or None if the segment no longer exists. Reads the whole segment, in steps.
        Ledgers may be dropped and the segment may be removed between two steps. Raises OSError for a temporary
        error."""
        segment = self._inventory.segments.get(file)
        if segment is None:
            return None
        found = yield from entries_in(segment)
        checkpoint = self._index_files.checkpoint(file)
        yield
        if self._inventory.segments.get(file) is not segment:
            return None
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
        if checkpoint is None or lost:
            return RebuiltIndex(found, None)
        data = yield from _made_again(checkpoint, found)
        return RebuiltIndex(found, data) if self._inventory.segments.get(file) is segment else None

    def _save(self, file: int, part: LedgerPart, entries: EntryIndex) -> None:
        """Add entries that the segment has lost, from the intact blocks of the index file."""
        for extent in part.extents:
            for number in range(blocks_of(extent.entries)):
                block = self._index_files.block(file, *block_span(extent.start, extent.entries, number))
                for entry, offset, size in zip(*block, strict=True) if block is not None else ():
                    if not entries.get(entry)[0]:
                        entries.put(entry, file << OFFSET_BITS | offset, size)

    def _lose(self, ledger: int, file: int) -> None:
        found = self._inventory.ledgers[ledger]
        log.error("segment and its index are damaged, entries may be missing ledger=%d segment=%d", ledger, file)
        found.is_limbo, found.is_admitted = True, False
        self.lost.add(ledger)
        self.on_lost(ledger)


def entries_in(segment: Segment) -> Steps[dict[int, EntryIndex]]:
    """Return the entries of a full segment from its records, as they were when it was full, by ledger."""
    data = yield from _read_what_can_be(segment)
    found: dict[int, EntryIndex] = {}
    scanned = yield from scan(data, segment.file, segment.salt, known_end=segment.end)
    for number, record in enumerate(scanned.records, 1):
        if number % STEP_RECORDS == 0:
            yield
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


def _read_what_can_be(segment: Segment) -> Steps[bytes]:
    """Return the segment's bytes, with zeros where the disk fails. Skip the rest of a part if the disk fails
    repeatedly, because the event loop is blocked by each read. Raises OSError for a temporary error."""
    try:
        file = segment.handle
    except OSError as error:
        if is_passing(error):
            raise
        log.error("segment cannot be read path=%s error=%s", segment.path, error)
        return b""
    parts, failed = list[bytes](), 0
    left = [(at, min(READ_BYTES, segment.end - at)) for at in range(0, segment.end, READ_BYTES)][::-1]
    while left:
        yield
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
            log.error("segment cannot be read path=%s from=%d to=%d error=%s", segment.path, at, at + size, error)
            parts.append(bytes(size))
    return b"".join(parts)


def _fits(part: LedgerPart, entries: EntryIndex) -> bool:
    if not part.extents:
        return not entries.count
    return entries.count > 0 and lay_out(entries.ids(), part.extents[0].start) == part.extents


def _made_again(checkpoint: Checkpoint, found: dict[int, EntryIndex]) -> Steps[bytes]:
    """Return the file with its former contents. The blocks of ledgers that were dropped since may be zeros, because
    they are never read."""
    end = max((part.extents[-1].end for part in checkpoint.ledgers if part.extents), default=HEADER_SIZE)
    blocks = bytearray(end - HEADER_SIZE)
    for part in checkpoint.ledgers:
        yield
        entries = found.get(part.ledger)
        if part.extents and entries is not None and _fits(part, entries):
            data = encode_extents(entries.columns(), part.extents, checkpoint.salt)
            at = part.extents[0].start - HEADER_SIZE
            blocks[at : at + len(data)] = data
    yield
    return with_table(bytes(blocks), checkpoint)
