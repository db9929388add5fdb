"""Where a ledger's entries are: entry id → (place, size). Decides only.

Entries in the segment that is being written are in memory, compactly: 12 bytes per entry, including holes. The number
of holes is bounded by the number of entries, so that entries far apart cost no more memory than others. Entries in full
segments are in the index files of these segments (docs/protocol.md, B31).

A place is one number: the segment id, followed by the record's offset in it.
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
"""Number of holes that are allowed, and the additional number for each entry. Entries further away go to a dict, where
each takes about as much memory as that many holes."""
NOWHERE = (0, 0)
"""Place and size of an entry that is not here."""


def place_of(file: int, offset: int) -> int:
    return file << OFFSET_BITS | offset


def file_of(place: int) -> int:
    return place >> OFFSET_BITS


class EntryColumns(NamedTuple):
    """Entries of one segment in ascending order of their ids, as parallel arrays."""

    entries: array[int]
    offsets: array[int]
    """Offsets of their records in the segment."""
    sizes: array[int]


class Sealed(Protocol):
    """A ledger's entries in full segments."""

    @property
    def last(self) -> int:
        """The highest of these entry ids."""
        ...

    def find(self, entry: int) -> tuple[int, int]:
        """Return the place and the size in bytes of the newest copy, or NOWHERE if there is none."""
        ...

    def runs(self) -> list[tuple[int, int]]: ...
    def inside(self, file: int) -> Iterator[tuple[int, int, int]]: ...


class EntryIndex:
    """The places of one ledger's entries. Place 0 means that the entry is not stored here. The arrays belong to one
    segment."""

    __slots__ = ("first", "holes", "others", "others_high", "others_low", "places", "sealed", "sealed_last", "sizes")

    def __init__(self) -> None:
        self.sealed: Sealed | None = None
        """The entries in full segments, which are older."""
        self.sealed_last = -1
        """No sealed entry is above this one."""
        self.first = 0
        """The first entry of the arrays."""
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.holes = 0
        """Number of array elements without an entry."""
        self.others: dict[int, tuple[int, int]] = {}
        self.others_low, self.others_high = 1 << 63, -1
        """Bounds of the entries that are or were outside of the arrays."""

    def put(self, entry: int, place: int, size: int) -> tuple[int, int]:
        """Record the place and the size of `entry`. Return the place and the size of its former copy, or NOWHERE if the
        entry is new or its former copy cannot be looked up now. Reads the disk only if full segments may have the
        entry."""
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
            before = self.others.get(entry) or self._former(entry)
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
            before = before if before[0] else self._former(entry)
        self.places[at] = place
        self.sizes[at] = size
        return before

    # docs/protocol.md B40
    def _former(self, entry: int) -> tuple[int, int]:
        """Return the place and the size of the copy in full segments, or NOWHERE if there is none. Also return NOWHERE
        if the disk cannot be read now: the new copy is on disk and must be shown. The older one then still counts as
        needed."""
        if entry > self.sealed_last or self.sealed is None:
            return NOWHERE
        try:
            return self.sealed.find(entry)
        except OSError:
            return NOWHERE

    def has_sealed(self, sealed: Sealed) -> None:
        """Also find entries in `sealed` from now on, up to its current last entry."""
        self.sealed, self.sealed_last = sealed, sealed.last

    def detach(self) -> EntryIndex:
        """Move everything in memory to a new index and return that index, because the segment is full."""
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
        """Move entries from outside the arrays into them, if there are now enough entries."""
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
        """Return the place and the size of `entry`, or NOWHERE if it is not stored here. Reads the disk for an entry in
        a full segment."""
        at = entry - self.first
        if 0 <= at < len(self.places) and self.places[at]:
            return self.places[at], self.sizes[at]
        if self.others and (found := self.others.get(entry)) is not None:
            return found
        return self.sealed.find(entry) if entry <= self.sealed_last and self.sealed is not None else NOWHERE

    def extend(self, first: int, places: array[int], sizes: array[int]) -> None:
        """Fill an empty index with a run of consecutive entries."""
        assert not self.count, "a run stands at the beginning"
        self.first = first
        self.places.extend(places)
        self.sizes.extend(sizes)
        self.holes += places.count(0)

    @property
    def last(self) -> int:
        """The highest entry id stored here, or -1 if there is none."""
        return max(self.first + len(self.places) - 1 if self.places else -1, self.others_high, self.sealed_last)

    @property
    def count(self) -> int:
        """Number of entries in memory."""
        return len(self.places) - self.holes + len(self.others)

    @property
    def bytes(self) -> int:
        """Sum of the entries' sizes."""
        return sum(self.sizes) + sum(size for _, size in self.others.values())

    def ids(self) -> Sequence[int]:
        """Return the ids of the entries in memory, in ascending order."""
        within = range(self.first, self.first + len(self.places))
        if self.others:
            return self.columns().entries
        return array("Q", compress(within, self.places)) if self.holes else within

    def columns(self) -> EntryColumns:
        """Return the entries in memory, all of which are in one segment, in ascending order."""
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
        """Return the entries as (first, count) runs in ascending order. Reads the disk for full segments with holes."""
        if self.sealed is None:
            return self._own_runs()
        return joined([*self.sealed.runs(), *self._own_runs()])

    def _own_runs(self) -> list[tuple[int, int]]:
        if not self.others and not self.holes:
            return [(self.first, len(self.places))] if self.places else []
        return runs_of(self.columns().entries)

    def inside(self, file: int) -> Iterator[tuple[int, int, int]]:
        """Yield (entry, place, size) for each entry in full segment `file`, in ascending order. Entries that have a
        newer copy are included."""
        return self.sealed.inside(file) if self.sealed is not None else iter(())


def _low(places: array[int]) -> array[int]:
    """Return the offsets in places: their lower halves, because every segment is shorter than 4 GiB."""
    return array("I", memoryview(places).cast("B").cast("I")[sys.byteorder == "big" :: 2])


def runs_of(entries: Iterable[int]) -> list[tuple[int, int]]:
    """Return entry ids, which must be in ascending order, as (first, count) runs."""
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
    """Return runs, which may be in any order and overlap, as separate runs in ascending order."""
    separate: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if separate and first <= sum(separate[-1]):
            begin, size = separate[-1]
            separate[-1] = (begin, max(size, first + count - begin))
        else:
            separate.append((first, count))
    return separate
