"""Where a ledger's entries are: entry id → (place, size). Compact: 12 bytes per entry, holes included.

A place is one number: segment id, then the record's offset in it. Decides only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

OFFSET_BITS = 40
OFFSET_MASK = (1 << OFFSET_BITS) - 1
HOLES_MAX = 1 << 16
"""Longest run of missing entries that is kept as holes; entries further out go to a dict."""
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

    __slots__ = ("first", "others", "places", "sizes")

    def __init__(self) -> None:
        self.first = 0
        """The entry that stands first in the arrays."""
        self.places: array[int] = array("Q")
        self.sizes: array[int] = array("I")
        self.others: dict[int, tuple[int, int]] = {}

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
        if at < 0 or at > len(self.places) + HOLES_MAX:
            before = self.others.get(entry, NOWHERE)
            self.others[entry] = (place, size)
            return before
        missing = at + 1 - len(self.places)
        if missing > 0:
            self.places.extend([0] * missing)
            self.sizes.extend([0] * missing)
        before = (self.places[at], self.sizes[at]) if self.places[at] else self.others.pop(entry, NOWHERE)
        self.places[at] = place
        self.sizes[at] = size
        return before

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
        return True

    @property
    def last(self) -> int:
        """The highest entry id here, -1 if there is none."""
        last = self.first + len(self.places) - 1 if self.places else -1
        return max(last, max(self.others)) if self.others else last

    def entries(self) -> Iterator[int]:
        """Entry ids, rising."""
        there = (self.first + at for at, place in enumerate(self.places) if place)
        if not self.others:
            return there
        return iter(sorted([*there, *self.others]))

    def runs(self) -> list[tuple[int, int]]:
        """The entries as runs (first, count), rising."""
        if not self.others and 0 not in self.places:
            return [(self.first, len(self.places))] if self.places else []
        runs: list[tuple[int, int]] = []
        for entry in self.entries():
            if runs and sum(runs[-1]) == entry:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((entry, 1))
        return runs

    def inside(self, file: int) -> list[tuple[int, int, int]]:
        """(entry, place, size) of the entries in segment `file`, rising by entry."""
        low, high = file << OFFSET_BITS, (file + 1) << OFFSET_BITS
        found = [
            (self.first + at, place, self.sizes[at]) for at, place in enumerate(self.places) if low <= place < high
        ]
        odd = [(entry, place, size) for entry, (place, size) in self.others.items() if low <= place < high]
        return sorted(found + odd) if odd else found
