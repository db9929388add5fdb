"""Everything that a bookie holds: ledgers, tombstones, and the number of bytes that each segment has of each ledger.

The inventory is built from the journal at start, and updated when the journal reports a group as synced. All of it is
in memory, except for the places of entries in full segments, which are in index files.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from struct import unpack

from kvstore.bookie.digests import is_same_entry
from kvstore.bookie.index.blocks import Extent
from kvstore.bookie.index.checkpoint import ADMITTED, FENCED, FORMAT, LIMBO, Checkpoint, LedgerPart
from kvstore.bookie.index.entry_index import OFFSET_BITS, OFFSET_MASK, file_of
from kvstore.bookie.index.index_files import IndexFiles
from kvstore.bookie.index.sealed_entries import SealedEntries
from kvstore.bookie.journal.record import ADMITTED as KEY_ADMITTED
from kvstore.bookie.journal.record import CLEARED, RecordHead, RecordKind
from kvstore.bookie.journal.segment import OpenFiles, Segment
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.statistics import Statistics
from kvstore.proto.digest import HEADER
from kvstore.types import NO_LEDGER, LedgerId

log = logging.getLogger(__name__)

DAMAGED_MAX = 10_000
"""Maximum number of damaged entries to remember; further ones are only counted."""


IsOurs = Callable[[LedgerId, bytes], bool]
"""Returns True if the key belongs to a ledger that this cluster created, with an id that the metadata store
allocated."""


def none_are_ours(_ledger: LedgerId, _key: bytes) -> bool:
    """Return False; used while the bookie does not know which ledgers are the cluster's own."""
    return False


class OwnLedgers:
    """Tracks the newest of the cluster's own ledgers, which a bookie recognizes by their keys."""

    def __init__(self, is_ours: IsOurs = none_are_ours) -> None:
        self.is_ours = is_ours
        self.newest = NO_LEDGER
        """Highest id of the cluster's own ledgers that any directory has had a record of (docs/protocol.md, G27)."""

    def saw(self, ledger: LedgerId, key: bytes) -> None:
        """Record that the bookie has a record of a ledger with this key."""
        if ledger > self.newest and self.is_ours(ledger, key):
            self.newest = ledger


class Inventory:
    """The inventory of one bookie, or of one of its directories. `close` returns the checkpoint of a full segment."""

    def __init__(self, index_files: IndexFiles, own_ledgers: OwnLedgers | None = None) -> None:
        self.index_files = index_files
        self._own_ledgers = own_ledgers or OwnLedgers()
        self.ledgers: dict[int, Ledger] = {}
        self.tombstones: set[int] = set()
        self.segments: dict[int, Segment] = {}
        self.open_files = OpenFiles()
        self.is_limbo = False
        """True if records of any ledger may be missing, including ledgers that are unknown here."""
        self.damaged: dict[tuple[int, int], int] = {}
        """Maps (ledger, entry) to the place of a copy that the last scrub, or a read since then, could not read."""
        self.expected: set[int] = set()
        """Segments that must exist according to the part of the journal read so far. Used only while the journal is
        read."""
        self._tails: list[Ledger] = []
        self._dropped: list[int] = []

    def runs(self, ledger: Ledger) -> list[tuple[int, int]]:
        """Return the entries that are stored here and not known to be damaged, as (first, count) runs in ascending
        order. Leaders copy the missing entries here again (docs/protocol.md, B14). Raises OSError if an index file
        cannot be read."""
        index = ledger.index
        bad = sorted(e for (of, e), place in self.damaged.items() if of == ledger.id and index.get(e)[0] == place)
        if not bad:
            return index.runs()
        runs, left = [], deque(bad)
        for first, count in index.runs():
            at, end = first, first + count
            while left and left[0] < end:
                entry = left.popleft()
                runs += [(at, entry - at)] if entry > at else []
                at = entry + 1
            runs += [(at, end - at)] if at < end else []
        return runs

    def note_damaged(self, ledger: int, entry: int, place: int) -> None:
        """Record that the copy at `place` is damaged."""
        if len(self.damaged) < DAMAGED_MAX:
            self.damaged[ledger, entry] = place

    def stored(self, segment: Segment, ledger: Ledger, entry: int, offset: int, size: int) -> None:
        """Record that an entry packet of `size` bytes is on disk at `offset` of the segment being written. An older
        copy of the entry is no longer needed."""
        if ledger.tail_file != segment.file:
            ledger.tail_file = segment.file
            self._tails.append(ledger)
            segment.touched.add(ledger.id)
        former, former_size = ledger.index.put(entry, segment.file << OFFSET_BITS | offset, size)
        if former:
            self._forget(ledger, segment, former, former_size)

    def _forget(self, ledger: Ledger, segment: Segment, place: int, size: int) -> None:
        """Record that the copy at `place` is no longer needed."""
        file = file_of(place)
        if file != segment.file:
            ledger.superseded[file] = ledger.superseded.get(file, 0) + size
            self._less_live(file, ledger.id, size)

    def _less_live(self, file: int, ledger: int, size: int) -> None:
        older = self.segments.get(file)
        if older is not None:
            older.live[ledger] = older.live.get(ledger, 0) - size

    # docs/protocol.md B4
    def drop(self, ledger: int, *, tombstone: bool) -> None:
        """Forget a deleted ledger, and wake everything that waits for it. With `tombstone`, the bookie keeps refusing
        ordinary adds to the ledger."""
        if tombstone:
            self.tombstones.add(ledger)
        self._dropped.append(ledger)
        gone = self.ledgers.pop(ledger, None)
        for segment in self.segments.values():
            segment.live.pop(ledger, None)
            segment.superseded.pop(ledger, None)
        if gone is not None:
            gone.wake()

    # docs/protocol.md B31
    def close(self, segment: Segment, last_group: int) -> Checkpoint:
        """Return the checkpoint of a full segment, count the segment's live bytes, and start the next segment. The
        segment's entries stay in memory until the checkpoint is written."""
        tails = {ledger.id for ledger in self._tails if self.ledgers.get(ledger.id) is ledger}
        there = sorted(segment.touched & self.ledgers.keys())
        parts = [_part(self.ledgers[each], is_tail=each in tails) for each in there]
        segment.live = {part.ledger: part.live_bytes for part in parts if part.live_bytes}
        segment.superseded = {part.ledger: part.superseded for part in parts if part.superseded}
        gone = sorted({*self._dropped, *(segment.touched - self.ledgers.keys())})
        self._tails = []
        self._dropped = []
        segment.touched.update(gone)
        segment.dropped = set(gone)
        checkpoint = Checkpoint(
            file=segment.file,
            salt=segment.salt,
            end=segment.end,
            last_group=last_group,
            is_limbo=self.is_limbo,
            files=sorted(self.segments),
            dropped=gone,
            tombstones=[each for each in gone if each in self.tombstones],
            ledgers=parts,
        )
        self._hold(checkpoint)
        return checkpoint

    def _hold(self, checkpoint: Checkpoint) -> None:
        """Move the entries of a full segment from the in-memory tails to their ledgers' sealed entries."""
        checkpoint.place_entries()
        self.index_files.hold(checkpoint)
        for part in checkpoint.ledgers:
            self._seal(self.ledgers[part.ledger], checkpoint.file, part.extents)

    def _seal(self, ledger: Ledger, file: int, extents: Sequence[Extent]) -> None:
        if not extents:
            return
        sealed = ledger.sealed
        if sealed is None:
            sealed = ledger.sealed = SealedEntries(ledger.id, self.index_files)
        sealed.add(file, extents)
        ledger.index.has_sealed(sealed)

    def sealed_in(self, segment: Segment) -> list[tuple[int, SealedEntries]]:
        """Return the ledgers that have entries in a full segment, with their sealed entries. Entries that were replaced
        since count too."""
        found = [(each, self.ledgers[each].sealed) for each in sorted(segment.touched & self.ledgers.keys())]
        return [(each, sealed) for each, sealed in found if sealed is not None and sealed.count(segment.file)]

    # docs/protocol.md B31
    def remove(self, segment: Segment) -> None:
        """Remove a segment whose needed records are now all in other segments. The caller may then delete its index
        file. The next checkpoint with facts of a ledger names the copies that the entries of this segment had
        replaced."""
        for _, sealed in self.sealed_in(segment):
            sealed.forget(segment.file)
        del self.segments[segment.file]
        for ledger, copies in segment.superseded.items():
            superseded = self.ledgers[ledger].superseded
            for file, size in copies:
                if file in self.segments:
                    superseded[file] = superseded.get(file, 0) + size
        self.index_files.forget(segment.file)

    def count(self, statistics: Statistics) -> None:
        """Update the statistics that are counted only on demand."""
        segments = self.segments.values()
        statistics.ledgers = len(self.ledgers)
        statistics.tombstones = len(self.tombstones)
        statistics.limbo_ledgers = sum(ledger.is_limbo for ledger in self.ledgers.values())
        statistics.segments = len(segments)
        statistics.disk_bytes = sum(segment.capacity for segment in segments)
        statistics.live_bytes = sum(segment.live_bytes for segment in segments)
        statistics.index_blocks_read = self.index_files.blocks_read
        statistics.index_files_rebuilt = self.index_files.rebuilt
        statistics.index_segments_in_memory = self.index_files.in_memory

    # Reading the journal back

    def load(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """Apply a segment's checkpoint, which has the same effect as reading the segment's records."""
        for ledger in checkpoint.dropped:
            self.drop(ledger, tombstone=False)
        self.tombstones.update(checkpoint.tombstones)
        self._dropped = []
        segment.touched = {*checkpoint.dropped, *(part.ledger for part in checkpoint.ledgers)}
        segment.dropped = set(checkpoint.dropped)
        for part in checkpoint.ledgers:
            self._load_facts(segment, part)
        if checkpoint.format == FORMAT:
            self.index_files.known(checkpoint.file, checkpoint.salt)
            for part in checkpoint.ledgers:
                self._load_entries(checkpoint.file, part)
        else:
            for part in checkpoint.ledgers:
                self._supersede(segment, part)
            self._hold(checkpoint)
        segment.superseded = {part.ledger: part.superseded for part in checkpoint.ledgers if part.superseded}
        self.set_limbo(checkpoint.is_limbo)

    def set_limbo(self, is_limbo: bool) -> None:
        """Set whether records of any ledger may be missing. If `is_limbo` is True, all known ledgers go into limbo now,
        and ledgers seen for the first time do so until this is revoked."""
        self.is_limbo = is_limbo
        for ledger in self.ledgers.values() if is_limbo else ():
            ledger.is_limbo = True
            ledger.is_admitted = False

    def _load_facts(self, segment: Segment, part: LedgerPart) -> None:
        ledger = self.known(part.ledger, part.key)
        ledger.is_fenced |= bool(part.flags & FENCED)
        ledger.is_admitted = bool(part.flags & ADMITTED)
        ledger.is_limbo = bool(part.flags & LIMBO)
        ledger.lac = max(ledger.lac, part.lac)
        if part.explicit_lac:
            ledger.set_explicit_lac(part.explicit_lac)
        if part.live_bytes:
            segment.live[part.ledger] = part.live_bytes

    def _load_entries(self, file: int, part: LedgerPart) -> None:
        for older, size in part.superseded:
            self._less_live(older, part.ledger, size)
        self._seal(self.ledgers[part.ledger], file, part.extents)

    def _supersede(self, segment: Segment, part: LedgerPart) -> None:
        """Find the copies in older segments that the entries of a checkpoint in an older format have replaced."""
        ledger = self.ledgers[part.ledger]
        for entry in part.entries.columns().entries if part.entries is not None else ():
            if entry <= ledger.index.sealed_last:
                former, size = ledger.index.get(entry)
                if former:
                    self._forget(ledger, segment, former, size)
        part.superseded, ledger.superseded = sorted(ledger.superseded.items()), {}

    def apply(self, segment: Segment, head: RecordHead, body: bytes) -> None:
        """Apply any record except an ADD."""
        if head.kind == RecordKind.FILES:
            self.expected = set(unpack(f">{head.size // 4}I", body))
        elif head.kind == RecordKind.NEXT:
            self.expected.add(head.entry)
        elif head.kind == RecordKind.REMOVED:
            self.expected.discard(head.entry)
        elif head.kind in (RecordKind.TOMBSTONE, RecordKind.DROPPED):
            segment.touched.add(head.ledger)
            self.drop(head.ledger, tombstone=head.kind == RecordKind.TOMBSTONE)
        elif head.kind == RecordKind.LIMBO and head.ledger < 0:
            self.set_limbo(not head.flags & CLEARED)
        else:
            self._apply_to_ledger(segment, head, body)

    def apply_add(self, segment: Segment, head: RecordHead, body: bytes, offset: int, *, is_good: bool) -> None:
        """Apply an ADD. A damaged packet still counts as present, so that the bookie never denies having the entry."""
        ledger = self.known(head.ledger)
        if head.entry > ledger.index.last or self._may_replace(ledger, head, body, is_good=is_good):
            self.stored(segment, ledger, head.entry, offset, head.size)
        if is_good:
            ledger.lac = max(ledger.lac, HEADER.unpack_from(body)[2])

    # docs/protocol.md B36
    def _may_replace(self, ledger: Ledger, head: RecordHead, body: bytes, *, is_good: bool) -> bool:
        """Return True unless an earlier record has a readable packet of the entry with another payload."""
        place, size = ledger.index.get(head.entry)
        segment = self.segments.get(file_of(place))
        if segment is None:
            return True
        held = segment.read_certainly(place & OFFSET_MASK, size, ledger=ledger.id, entry=head.entry)
        if held is None or (is_good and is_same_entry(held, body)):
            return True
        log.error("later record of a stored entry has another payload ledger=%d entry=%d", ledger.id, head.entry)
        return False

    def _apply_to_ledger(self, segment: Segment, head: RecordHead, body: bytes) -> None:
        segment.touched.add(head.ledger)
        if head.kind == RecordKind.KEY:
            ledger = self.known(head.ledger, body)
            ledger.is_admitted = bool(head.flags & KEY_ADMITTED)
        elif head.kind == RecordKind.FENCE:
            self.known(head.ledger, body).is_fenced = True
        elif head.kind == RecordKind.LAC:
            self.known(head.ledger).set_explicit_lac(body)
        elif head.kind == RecordKind.LIMBO:
            ledger = self.known(head.ledger)
            ledger.is_limbo = not head.flags & CLEARED
            ledger.is_admitted &= not ledger.is_limbo

    # docs/protocol.md B7
    def known(self, ledger: int, key: bytes = b"") -> Ledger:
        """Return the ledger's record, and create it if there is none. A new ledger starts in limbo while records of any
        ledger may be missing. `key` is recorded only if the ledger has no key yet."""
        found = self.ledgers.get(ledger)
        if found is None:
            found = self.ledgers[ledger] = Ledger(LedgerId(ledger), b"")
            found.is_limbo = self.is_limbo
        if key and not found.key:
            found.key = key
            self._own_ledgers.saw(found.id, key)
        return found


def _part(ledger: Ledger, *, is_tail: bool) -> LedgerPart:
    """Return the ledger's part of a checkpoint. `is_tail`: entries of the ledger are in the full segment."""
    flags = FENCED * ledger.is_fenced | ADMITTED * ledger.is_admitted | LIMBO * ledger.is_limbo
    part = LedgerPart(ledger.id, flags, ledger.lac, ledger.key, ledger.explicit_lac)
    part.superseded, ledger.superseded = sorted(ledger.superseded.items()), {}
    if is_tail:
        part.entries = ledger.index.detach()
        part.live_bytes = part.entries.bytes
        ledger.tail_file = 0
    return part
