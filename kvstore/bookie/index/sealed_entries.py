"""One ledger's entries in full segments: their places are in index files; memory only has which file may contain an
entry.

That takes about 40 bytes for each range of entries in a segment, and 8 bytes for every 255 entries where there are
holes. A lookup reads a block of one index file, and one more for each newer segment with entries on both sides.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from kvstore.bookie.index.blocks import Extent, block_number, block_span, blocks_of
from kvstore.bookie.index.entry_index import NOWHERE, OFFSET_BITS, joined, runs_of
from kvstore.bookie.index.index_files import IndexFiles


class SealedEntries:
    """Extents in the order of their first entries. If there are several copies of an entry, the one in the newest
    segment counts."""

    __slots__ = ("_counts", "_fences", "_files", "_firsts", "_high", "_index_files", "_lasts", "_ledger", "_starts")

    def __init__(self, ledger: int, index_files: IndexFiles) -> None:
        self._ledger = ledger
        self._index_files = index_files
        self._firsts = array("Q")
        self._lasts = array("Q")
        self._high = array("Q")
        """The highest entry of an extent and all before it, so that a lookup does not go back too far."""
        self._counts = array("I")
        self._files = array("I")
        self._starts = array("Q")
        self._fences: dict[tuple[int, int], array[int]] = {}
        """(segment, start) → the first entries of the blocks."""

    def add(self, file: int, extents: Iterable[Extent]) -> None:
        """Add the extents of segment `file`, which is newer than all others here."""
        for extent in extents:
            at = bisect_right(self._firsts, extent.first)
            self._firsts.insert(at, extent.first)
            self._lasts.insert(at, extent.last)
            self._counts.insert(at, extent.entries)
            self._files.insert(at, file)
            self._starts.insert(at, extent.start)
            self._high.insert(at, 0)
            self._rise(at)
            if extent.fences:
                self._fences[file, extent.start] = extent.fences

    def _rise(self, at: int) -> None:
        high = self._high[at - 1] if at else 0
        for each in range(at, len(self._lasts)):
            high = self._high[each] = max(high, self._lasts[each])

    def forget(self, file: int) -> None:
        """Remove a segment, because its needed entries are in newer ones."""
        rows = [row for row, of in enumerate(self._files) if of != file]
        if len(rows) == len(self._files):
            return
        self._firsts = array("Q", (self._firsts[row] for row in rows))
        self._lasts = array("Q", (self._lasts[row] for row in rows))
        self._high = array("Q", bytes(8 * len(rows)))
        self._counts = array("I", (self._counts[row] for row in rows))
        self._starts = array("Q", (self._starts[row] for row in rows))
        self._files = array("I", (self._files[row] for row in rows))
        self._fences = {key: fences for key, fences in self._fences.items() if key[0] != file}
        self._rise(0)

    @property
    def last(self) -> int:
        """The highest entry here, -1 if there is none."""
        return self._high[-1] if self._high else -1

    def count(self, file: int) -> int:
        """Return the number of entries in segment `file`."""
        return sum(count for of, count in zip(self._files, self._counts, strict=True) if of == file)

    # docs/protocol.md B31
    def find(self, entry: int) -> tuple[int, int]:
        """Return place and size of the newest copy of `entry`; NOWHERE if it is not here."""
        newest, found = 0, NOWHERE
        row = bisect_right(self._firsts, entry) - 1
        while row >= 0 and self._high[row] >= entry:
            if self._lasts[row] >= entry and self._files[row] > newest:
                place, size = self._find(row, entry)
                if place:
                    newest, found = self._files[row], (place, size)
            row -= 1
        return found

    def _find(self, row: int, entry: int) -> tuple[int, int]:
        file, start, count = self._files[row], self._starts[row], self._counts[row]
        fences = self._fences.get((file, start), ()) if self._fences else ()
        first = self._firsts[row]
        is_dense = self._lasts[row] - first + 1 == count
        number = block_number(first, fences, entry) if is_dense or fences else 0
        at, size = block_span(start, count, number)
        return self._index_files.find(file, self._ledger, at, size, entry)

    def runs(self) -> list[tuple[int, int]]:
        """Return the entries as rising runs (first, count). Reads the ranges that have holes."""
        runs: list[tuple[int, int]] = []
        for row, file in enumerate(self._files):
            first, last, count = self._firsts[row], self._lasts[row], self._counts[row]
            if last - first + 1 == count and not self._index_files.is_held(file):
                runs.append((first, count))
            else:
                runs += runs_of(entry for entry, _, _ in self._in_row(row))
        return joined(runs)

    def inside(self, file: int) -> Iterator[tuple[int, int, int]]:
        """Yield (entry, place, size) of the entries in segment `file`, rising, including those with a newer copy
        elsewhere."""
        rows = [(self._firsts[row], row) for row, of in enumerate(self._files) if of == file]
        spans = [(self._starts[row], self._firsts[row], self._lasts[row], self._counts[row]) for _, row in sorted(rows)]
        for start, first, last, count in spans:  # rows may move between two steps
            yield from self._entries(file, start, first, last, count)

    def _in_row(self, row: int) -> Iterator[tuple[int, int, int]]:
        return self._entries(
            self._files[row], self._starts[row], self._firsts[row], self._lasts[row], self._counts[row]
        )

    def _entries(self, file: int, start: int, first: int, last: int, count: int) -> Iterator[tuple[int, int, int]]:
        segment, done = file << OFFSET_BITS, first - 1
        for number in range(blocks_of(count)):
            at, size = block_span(start, count, number)
            block = self._index_files.columns(file, at, size)
            if block is None:
                break
            for entry, offset, bytes_ in zip(*block, strict=True):
                done = entry
                yield entry, segment | offset, bytes_
        else:
            return
        held = self._index_files.held(file, self._ledger).columns()
        for entry, offset, bytes_ in zip(*held, strict=True):
            if done < entry <= last:
                yield entry, segment | offset, bytes_
