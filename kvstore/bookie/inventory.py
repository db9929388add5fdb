"""Everything a bookie holds, in memory: ledgers, tombstones, and which segment has how much of whom.

Built from the journal at start and kept up to date with what the journal reports as synced. No I/O.
"""

from __future__ import annotations

from collections import deque
from struct import unpack

from kvstore.bookie.checkpoint import ADMITTED, FENCED, LIMBO, Checkpoint, LedgerPart
from kvstore.bookie.entry_index import OFFSET_BITS, file_of
from kvstore.bookie.journal.record import ADMITTED as KEY_ADMITTED
from kvstore.bookie.journal.record import CLEARED, Kind, RecordHead
from kvstore.bookie.journal.segment import OpenFiles, Segment
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.statistics import Statistics
from kvstore.proto.digest import HEADER
from kvstore.types import LedgerId

DAMAGED_MAX = 10_000
"""Damaged entries that are remembered; more are only counted."""


class Inventory:
    """The bookie's books. Between two segments `close` says what the one that is full holds."""

    def __init__(self) -> None:
        self.ledgers: dict[int, Ledger] = {}
        self.tombstones: set[int] = set()
        self.segments: dict[int, Segment] = {}
        self.open_files = OpenFiles()
        self.is_limbo = False
        """Records of any ledger may be missing, ledgers included that are not known here."""
        self.damaged: dict[tuple[int, int], int] = {}
        """(ledger, entry) → place of the copies that the last scrub, or a read since, could not read."""
        self.expected: set[int] = set()
        """Segments that must be there, as far as the journal has been read. Only used while it is."""
        self._tails: list[Ledger] = []
        self._dropped: list[int] = []

    def runs(self, ledger: Ledger) -> list[tuple[int, int]]:
        """The entries that are here and not known to be damaged, as runs (first, count), rising. Leaders copy the rest
        here again (docs/protocol.md, B14)."""
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
        """A copy cannot be read as it was written."""
        if len(self.damaged) < DAMAGED_MAX:
            self.damaged[ledger, entry] = place

    def stored(self, segment: Segment, ledger: Ledger, entry: int, offset: int, size: int) -> None:
        """An entry packet of `size` bytes is on the disk, at `offset` of the segment that is being written."""
        index = ledger.index
        if ledger.tail_from < 0:
            ledger.tail_from = len(index.places)
            self._tails.append(ledger)
            segment.touched.add(ledger.id)
        former, former_size = index.put(entry, segment.file << OFFSET_BITS | offset, size)
        ledger.tail_bytes += size
        at = entry - index.first
        if at < ledger.tail_from or at >= len(index.places):
            ledger.tail_moved.append(entry)
        if former:
            self._forget(ledger, segment, former, former_size)

    def _forget(self, ledger: Ledger, segment: Segment, place: int, size: int) -> None:
        """The copy at `place` is not wanted any more."""
        file = file_of(place)
        if file == segment.file:
            ledger.tail_bytes -= size
        elif (older := self.segments.get(file)) is not None:
            older.live[ledger.id] = older.live.get(ledger.id, 0) - size

    # docs/protocol.md B4
    def drop(self, ledger: int, *, tombstone: bool) -> None:
        """Forget a ledger that was deleted. Who waits for it is woken."""
        if tombstone:
            self.tombstones.add(ledger)
        self._dropped.append(ledger)
        gone = self.ledgers.pop(ledger, None)
        for segment in self.segments.values():
            segment.live.pop(ledger, None)
        if gone is not None:
            gone.wake()

    def close(self, segment: Segment, last_group: int) -> Checkpoint:
        """The checkpoint of a segment that is full; counts what is live in it. The next one begins."""
        tails = {ledger.id: ledger for ledger in self._tails if self.ledgers.get(ledger.id) is ledger}
        there = sorted(segment.touched & self.ledgers.keys())
        parts = [_part(self.ledgers[each], segment if each in tails else None) for each in there]
        segment.live = {part.ledger: part.live_bytes for part in parts if part.live_bytes}
        gone = sorted({*self._dropped, *(segment.touched - self.ledgers.keys())})
        for ledger in self._tails:
            ledger.tail_from = -1
            ledger.tail_bytes = 0
            ledger.tail_moved = []
            ledger.index.compact()
        self._tails = []
        self._dropped = []
        segment.touched.update(gone)
        return Checkpoint(
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

    def count(self, statistics: Statistics) -> None:
        """Fill in what is counted only on demand."""
        segments = self.segments.values()
        statistics.ledgers = len(self.ledgers)
        statistics.tombstones = len(self.tombstones)
        statistics.limbo_ledgers = sum(ledger.is_limbo for ledger in self.ledgers.values())
        statistics.segments = len(segments)
        statistics.disk_bytes = sum(segment.capacity for segment in segments)
        statistics.live_bytes = sum(segment.live_bytes for segment in segments)

    # Reading the journal back

    def load(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """Apply a segment's checkpoint: the same as its records."""
        for ledger in checkpoint.dropped:
            self.drop(ledger, tombstone=False)
        self.tombstones.update(checkpoint.tombstones)
        self._dropped = []
        segment.touched = {*checkpoint.dropped, *(part.ledger for part in checkpoint.ledgers)}
        for part in checkpoint.ledgers:
            self._load_part(segment, part)
        self.set_limbo(checkpoint.is_limbo)

    def set_limbo(self, is_limbo: bool) -> None:
        """Records of any ledger may be missing: of those known here at once, of all others until this is taken back."""
        self.is_limbo = is_limbo
        for ledger in self.ledgers.values() if is_limbo else ():
            ledger.is_limbo = True
            ledger.is_admitted = False

    def _load_part(self, segment: Segment, part: LedgerPart) -> None:
        ledger = self.known(part.ledger, part.key)
        ledger.is_fenced |= bool(part.flags & FENCED)
        ledger.is_admitted = bool(part.flags & ADMITTED)
        ledger.is_limbo = bool(part.flags & LIMBO)
        ledger.lac = max(ledger.lac, part.lac)
        if part.explicit_lac:
            ledger.set_explicit_lac(part.explicit_lac)
        if part.live_bytes:
            segment.live[part.ledger] = part.live_bytes
        moved = part.moved
        if part.places and not ledger.index.extend(part.first, part.places, part.sizes):
            run = enumerate(zip(part.places, part.sizes, strict=True), part.first)
            moved = [*((entry, place, size) for entry, (place, size) in run if place), *moved]
        for entry, place, size in moved:
            former, former_size = ledger.index.put(entry, place, size)
            if former and file_of(former) != segment.file:
                self._forget(ledger, segment, former, former_size)
        ledger.index.compact()

    def apply(self, segment: Segment, head: RecordHead, body: bytes) -> None:
        """Apply any record but an ADD."""
        if head.kind == Kind.FILES:
            self.expected = set(unpack(f">{head.size // 4}I", body))
        elif head.kind == Kind.NEXT:
            self.expected.add(head.entry)
        elif head.kind == Kind.REMOVED:
            self.expected.discard(head.entry)
        elif head.kind in (Kind.TOMBSTONE, Kind.DROPPED):
            segment.touched.add(head.ledger)
            self.drop(head.ledger, tombstone=head.kind == Kind.TOMBSTONE)
        elif head.kind == Kind.LIMBO and head.ledger < 0:
            self.set_limbo(not head.flags & CLEARED)
        else:
            self._apply_to_ledger(segment, head, body)

    def apply_add(self, segment: Segment, head: RecordHead, body: bytes, offset: int, *, is_good: bool) -> None:
        """Apply an ADD. A damaged packet still counts as there, so that nobody is told that there is no such entry."""
        ledger = self.known(head.ledger)
        self.stored(segment, ledger, head.entry, offset, head.size)
        if is_good:
            ledger.lac = max(ledger.lac, HEADER.unpack_from(body)[2])

    def _apply_to_ledger(self, segment: Segment, head: RecordHead, body: bytes) -> None:
        segment.touched.add(head.ledger)
        if head.kind == Kind.KEY:
            ledger = self.known(head.ledger, body)
            ledger.is_admitted = bool(head.flags & KEY_ADMITTED)
        elif head.kind == Kind.FENCE:
            self.known(head.ledger, body).is_fenced = True
        elif head.kind == Kind.LAC:
            self.known(head.ledger).set_explicit_lac(body)
        elif head.kind == Kind.LIMBO:
            ledger = self.known(head.ledger)
            ledger.is_limbo = not head.flags & CLEARED
            ledger.is_admitted &= not ledger.is_limbo

    def known(self, ledger: int, key: bytes = b"") -> Ledger:
        """The ledger's entry in the books, made if there is none. A key is kept unless one is known."""
        found = self.ledgers.get(ledger)
        if found is None:
            found = self.ledgers[ledger] = Ledger(LedgerId(ledger), key)
        found.key = found.key or key
        return found


def _part(ledger: Ledger, segment: Segment | None) -> LedgerPart:
    """`segment`: the one that is full, if entries of the ledger are in it."""
    flags = FENCED * ledger.is_fenced | ADMITTED * ledger.is_admitted | LIMBO * ledger.is_limbo
    part = LedgerPart(ledger.id, flags, ledger.lac, ledger.key, ledger.explicit_lac)
    if segment is None:
        return part
    index, start = ledger.index, ledger.tail_from
    part.live_bytes = ledger.tail_bytes
    part.first = index.first + start
    part.places, part.sizes = index.places[start:], index.sizes[start:]
    places = ((entry, *index.get(entry)) for entry in sorted(set(ledger.tail_moved)))
    part.moved = [moved for moved in places if file_of(moved[1]) == segment.file]
    return part
