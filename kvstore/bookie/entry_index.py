"""Where a ledger's entries are: entry id → (place, size). Compact: 12 bytes per entry, holes included. Decides only.

Holes are bounded by what is there, so that entries far from each other cost no more memory than as many that are not.
A place is one number: segment id, then the record's offset in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

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


class EntryIndex:
    """One ledger's entries. Place 0 means: not here."""

    __slots__ = ("first", "holes", "others", "others_high", "others_low", "places", "sizes")

    def __init__(self) -> None:
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
        """Record where `entry` is; returns the place and size of its former copy, NOWHERE if it is new."""
        places = self.places
        at = entry - self.first
        if at and at == len(places) and not self.others:
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
            before = self.others.get(entry, NOWHERE)
            self.others[entry] = (place, size)
            self.others_low, self.others_high = min(self.others_low, entry), max(self.others_high, entry)
            return before
        if missing > 0:
            self.places.extend([0] * missing)
            self.sizes.extend([0] * missing)
            self.holes += missing
        is_new = not self.places[at]
        before = self.others.pop(entry, NOWHERE) if is_new else (self.places[at], self.sizes[at])
        self.holes -= is_new
        self.places[at] = place
        self.sizes[at] = size
        return before

    @staticmethod
    def _holes_max(entries: int) -> int:
        return HOLES_MIN + HOLES_EACH * entries

    def compact(self) -> None:
        """Take what is out of the arrays into them, if by now there is enough of it. Whoever remembers where in the
        arrays something begins must not do this."""
        count = len(self.places) - self.holes + len(self.others)
        if not self.others:
            return
        low = min(self.first, self.others_low)
        if self.last - low + 1 - count > self._holes_max(count):
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
        """Place and size of `entry`; NOWHERE if it is not here."""
        at = entry - self.first
        if 0 <= at < len(self.places) and self.places[at]:
            return self.places[at], self.sizes[at]
        return self.others.get(entry, NOWHERE) if self.others else NOWHERE

    def extend(self, first: int, places: array[int], sizes: array[int]) -> bool:
        """Append a run of entries that follows on; False, and nothing done, if it does not."""
        if not self.places and not self.others:
            self.first = first
        elif first != self.first + len(self.places) or self.others:
            return False
        self.places.extend(places)
        self.sizes.extend(sizes)
        self.holes += places.count(0)
        return True

    @property
    def last(self) -> int:
        """The highest entry id here, -1 if there is none."""
        return max(self.first + len(self.places) - 1 if self.places else -1, self.others_high)

    def entries(self) -> Iterator[int]:
        """Entry ids, rising."""
        there = (self.first + at for at, place in enumerate(self.places) if place)
        if not self.others:
            return there
        return iter(sorted([*there, *self.others]))

    def runs(self) -> list[tuple[int, int]]:
        """The entries as runs (first, count), rising."""
        if not self.others and not self.holes:
            return [(self.first, len(self.places))] if self.places else []
        runs: list[tuple[int, int]] = []
        first = end = -1
        for entry in self.entries():
            if entry != end:
                if end > first:
                    runs.append((first, end - first))
                first = entry
            end = entry + 1
        return [*runs, (first, end - first)] if end > first else runs

    def inside(self, file: int) -> list[tuple[int, int, int]]:
        """(entry, place, size) of the entries in segment `file`, rising by entry."""
        low, high = file << OFFSET_BITS, (file + 1) << OFFSET_BITS
        found = [
            (self.first + at, place, self.sizes[at]) for at, place in enumerate(self.places) if low <= place < high
        ]
        odd = [(entry, place, size) for entry, (place, size) in self.others.items() if low <= place < high]
        return sorted(found + odd) if odd else found
