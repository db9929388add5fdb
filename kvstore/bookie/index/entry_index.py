"""Where a ledger's entries are: entry id → (place, size). Decides only.

Those in the segment that is being written are in memory, compactly: 12 bytes per entry, holes included. Holes are
bounded by what is there, so that entries far from each other cost no more memory than as many that are not. Those in
full segments are in these segments' index files (docs/protocol.md, B31).
A place is one number: segment id, then the record's offset in it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

OFFSET_BITS = 40
OFFSET_MASK = (1 << OFFSET_BITS) - 1
HOLES_MIN, HOLES_EACH = 1024, 16
"""So many holes may there be, and so many more with each entry that is here; entries further out go to a dict, where
each takes about as much as so many holes."""
NOWHERE = (0, 0)
"""Place and size of an entry that is not here."""


def place_of(file: int, offset: int) -> int:
    return file << OFFSET_BITS | offset


def file_of(place: int) -> int:
    return place >> OFFSET_BITS


def offset_of(place: int) -> int:
    return place & OFFSET_MASK


class EntryColumns(NamedTuple):
    """Entries of one segment, rising by id."""

    entries: array[int]
    offsets: array[int]
    """Of their records in the segment."""
    sizes: array[int]


class Sealed(Protocol):
    """A ledger's entries in full segments."""

    @property
    def last(self) -> int:
        """The highest entry id of these."""
        ...

    def find(self, entry: int) -> tuple[int, int]:
        """Place and size of the newest copy; NOWHERE if there is none."""
        ...

    def runs(self) -> list[tuple[int, int]]: ...
    def inside(self, file: int) -> Iterator[tuple[int, int, int]]: ...


class EntryIndex:
    """One ledger's entries. Place 0 means: not here. The arrays are of one segment."""

    __slots__ = ("first", "holes", "others", "others_high", "others_low", "places", "sealed", "sealed_last", "sizes")

    def __init__(self) -> None:
        self.sealed: Sealed | None = None
        """The entries in full segments, which are older."""
        self.sealed_last = -1
        """No entry above this is among them."""
        self.first = 0
        """The entry that stands first in the arrays."""
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.holes = 0
        """Entries in the arrays that are not here."""
        self.others: dict[int, tuple[int, int]] = {}
        self.others_low, self.others_high = 1 << 63, -1
        """No entry is or was out of the arrays below or above."""

    def put(self, entry: int, place: int, size: int) -> tuple[int, int]:
        """Record where `entry` is; returns the place and size of its former copy, NOWHERE if it is new. Only of an
        entry that full segments may have a read of the disk."""
        places = self.places
        at = entry - self.first
        if at and at == len(places) and entry > self.sealed_last and not self.others:
            places.append(place)
            self.sizes.append(size)
            return NOWHERE
        return self._put(entry, place, size)

    def _put(self, entry: int, place: int, size: int) -> tuple[int, int]:
        if not self.places:
            self.first = entry
        at = entry - self.first
        missing = at + 1 - len(self.places)
        if at < 0 or self.holes + missing - 1 > self._holes_max(len(self.places) + 1 - self.holes):
            before = self.others.get(entry) or self._sealed(entry)
            self.others[entry] = (place, size)
            self.others_low, self.others_high = min(self.others_low, entry), max(self.others_high, entry)
            return before
        if missing > 0:
            self.places.extend([0] * missing)
            self.sizes.extend([0] * missing)
            self.holes += missing
        if self.places[at]:
            before = self.places[at], self.sizes[at]
        else:
            self.holes -= 1
            before = self.others.pop(entry, NOWHERE) if self.others else NOWHERE
            before = before if before[0] else self._sealed(entry)
        self.places[at] = place
        self.sizes[at] = size
        return before

    def _sealed(self, entry: int) -> tuple[int, int]:
        return self.sealed.find(entry) if entry <= self.sealed_last and self.sealed is not None else NOWHERE

    def has_sealed(self, sealed: Sealed) -> None:
        """Look for entries in `sealed` from now on too, as far as it goes now."""
        self.sealed, self.sealed_last = sealed, sealed.last

    def detach(self) -> EntryIndex:
        """Take out all that is in memory, as an index of its own: its segment is full."""
        self.compact()
        taken = EntryIndex()
        taken.first, taken.places, taken.sizes, taken.holes = self.first, self.places, self.sizes, self.holes
        taken.others, taken.others_low, taken.others_high = self.others, self.others_low, self.others_high
        self.first, self.places, self.sizes, self.holes = 0, array("Q"), array("I"), 0
        self.others, self.others_low, self.others_high = {}, 1 << 63, -1
        return taken

    @staticmethod
    def _holes_max(entries: int) -> int:
        return HOLES_MIN + HOLES_EACH * entries

    def compact(self) -> None:
        """Take what is out of the arrays into them, if by now there is enough of it."""
        if not self.others:
            return
        count = self.count
        low = min(self.first, self.others_low)
        high = max(self.first + len(self.places) - 1, self.others_high)
        if high - low + 1 - count > self._holes_max(count):
            return
        found = sorted((entry, *where) for entry, where in self.others.items())
        if self.others_low < self.first + len(self.places):
            found = sorted([*self._in_arrays(), *found])
            self.first, self.places, self.sizes, self.holes = low, array("Q"), array("I"), 0
        self.others, self.others_low, self.others_high = {}, 1 << 63, -1
        for entry, place, size in found:
            missing = [0] * (entry - self.first - len(self.places))
            self.holes += len(missing)
            self.places.extend([*missing, place])
            self.sizes.extend([*missing, size])

    def _in_arrays(self) -> Iterator[tuple[int, int, int]]:
        return ((self.first + at, place, self.sizes[at]) for at, place in enumerate(self.places) if place)

    def get(self, entry: int) -> tuple[int, int]:
        """Place and size of `entry`; NOWHERE if it is not here. Of one in a full segment by a read of the disk."""
        at = entry - self.first
        if 0 <= at < len(self.places) and self.places[at]:
            return self.places[at], self.sizes[at]
        if self.others and (found := self.others.get(entry)) is not None:
            return found
        return self.sealed.find(entry) if entry <= self.sealed_last and self.sealed is not None else NOWHERE

    def extend(self, first: int, places: array[int], sizes: array[int]) -> None:
        """Begin with a run of entries; there must be none yet."""
        assert not self.count, "a run stands at the beginning"
        self.first = first
        self.places.extend(places)
        self.sizes.extend(sizes)
        self.holes += places.count(0)

    @property
    def last(self) -> int:
        """The highest entry id here, -1 if there is none."""
        return max(self.first + len(self.places) - 1 if self.places else -1, self.others_high, self.sealed_last)

    @property
    def count(self) -> int:
        """How many entries are in memory."""
        return len(self.places) - self.holes + len(self.others)

    @property
    def bytes(self) -> int:
        """The sum of the entries' sizes."""
        return sum(self.sizes) + sum(size for _, size in self.others.values())

    def ids(self) -> Sequence[int]:
        """The entries in memory, rising."""
        within = range(self.first, self.first + len(self.places))
        if self.others:
            return self.columns().entries
        return array("Q", compress(within, self.places)) if self.holes else within

    def columns(self) -> EntryColumns:
        """The entries in memory, all of which are in one segment."""
        if not self.others and not self.holes:
            return EntryColumns(
                array("Q", range(self.first, self.first + len(self.places))), _low(self.places), self.sizes
            )
        if not self.others:
            there = array("Q", compress(range(self.first, self.first + len(self.places)), self.places))
            return EntryColumns(
                there, _low(array("Q", filter(None, self.places))), array("I", compress(self.sizes, self.places))
            )
        found = sorted([*self._in_arrays(), *((entry, *where) for entry, where in self.others.items())])
        ids, places, sizes = zip(*found, strict=True)
        return EntryColumns(array("Q", ids), _low(array("Q", places)), array("I", sizes))

    def runs(self) -> list[tuple[int, int]]:
        """The entries as runs (first, count), rising. Those in full segments by reads of the disk where they have
        holes."""
        if self.sealed is None:
            return self._own_runs()
        return joined([*self.sealed.runs(), *self._own_runs()])

    def _own_runs(self) -> list[tuple[int, int]]:
        if not self.others and not self.holes:
            return [(self.first, len(self.places))] if self.places else []
        return runs_of(self.columns().entries)

    def inside(self, file: int) -> Iterator[tuple[int, int, int]]:
        """(entry, place, size) of the entries in full segment `file`, rising by entry; also of those of which there is
        a newer copy."""
        return self.sealed.inside(file) if self.sealed is not None else iter(())


def _low(places: array[int]) -> array[int]:
    """The offsets in places: their lower halves, since no segment is as long as 4 GiB."""
    return array("I", memoryview(places).cast("B").cast("I")[sys.byteorder == "big" :: 2])


def runs_of(entries: Iterable[int]) -> list[tuple[int, int]]:
    """Entry ids, which rise, as runs (first, count)."""
    runs: list[tuple[int, int]] = []
    first = end = -1
    for entry in entries:
        if entry != end:
            if end > first:
                runs.append((first, end - first))
            first = entry
        end = entry + 1
    return [*runs, (first, end - first)] if end > first else runs


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs in any order, which may overlap, as runs that rise and do not touch."""
    whole: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if whole and first <= sum(whole[-1]):
            begin, size = whole[-1]
            whole[-1] = (begin, max(size, first + count - begin))
        else:
            whole.append((first, count))
    return whole
