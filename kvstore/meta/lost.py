"""Entries of a ledger that were marked as lost. The mark is in the ledger's custom metadata, so that nobody searches
for copies of them again. Decides only.

value := range *("," range)      range := first ["-" last]      ascending, in decimal; both ends included
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from kvstore.types import EntryId, LedgerMetadata

LOST_KEY = "kvstore-lost"


def lost_entries(metadata: LedgerMetadata) -> list[range]:
    """Return the entries that were marked as lost; none if the mark cannot be read."""
    found = []
    for key, value in metadata.custom:
        try:
            for part in value.decode().split(",") if key == LOST_KEY else ():
                first, _, last = part.partition("-")
                found.append(range(int(first), int(last or first) + 1))
        except ValueError:
            return []
    return found


def given_up(metadata: LedgerMetadata) -> Callable[[EntryId], bool]:
    """Return a function that returns True for entries marked as lost. There may be very many of them."""
    lost = sorted(lost_entries(metadata), key=lambda part: part.start)
    firsts = [part.start for part in lost]

    def is_given_up(entry: EntryId) -> bool:
        at = bisect_right(firsts, entry)
        return at > 0 and entry in lost[at - 1]

    return is_given_up


def without_lost(metadata: LedgerMetadata, entries: Collection[EntryId]) -> frozenset[EntryId]:
    """Return the entries that were not marked as lost."""
    is_given_up = given_up(metadata)
    return frozenset(each for each in entries if not is_given_up(each))


def with_lost(metadata: LedgerMetadata, entries: Iterable[EntryId]) -> LedgerMetadata:
    """Return the same ledger with exactly these entries marked as lost."""
    others = tuple((key, value) for key, value in metadata.custom if key != LOST_KEY)
    text = text_of(runs_of(entries))
    return replace(metadata, custom=tuple(sorted((*others, (LOST_KEY, text.encode())))) if text else others)


def runs_of(entries: Iterable[EntryId]) -> list[range]:
    """Return the entries as ranges of neighbours, ascending."""
    found: list[range] = []
    for entry in sorted(entries):
        if found and found[-1].stop == entry:
            found[-1] = range(found[-1].start, entry + 1)
        else:
            found.append(range(entry, entry + 1))
    return found


def text_of(runs: Iterable[range]) -> str:
    return ",".join(f"{run.start}" if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)
