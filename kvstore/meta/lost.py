"""Marks entries of a ledger as lost. The mark is in the ledger's custom metadata, so that no process searches again for
copies of these entries. Decides only.

    value := range *("," range)      range := first ["-" last]      ascending, in decimal; both ends included
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from kvstore.types import EntryId, LedgerMetadata

LOST_KEY = "kvstore-lost"


def lost_entries(metadata: LedgerMetadata) -> list[range]:
    """Return the entries that are marked as lost, as ranges; empty if there is no mark or the mark cannot be read."""
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
    """Return a function that returns True for entries that are marked as lost. It is fast even if very many entries
    are marked."""
    lost = sorted(lost_entries(metadata), key=lambda part: part.start)
    firsts = [part.start for part in lost]

    def is_given_up(entry: EntryId) -> bool:
        at = bisect_right(firsts, entry)
        return at > 0 and entry in lost[at - 1]

    return is_given_up


def without_lost(metadata: LedgerMetadata, entries: Collection[EntryId]) -> frozenset[EntryId]:
    """Return the given entries without the entries that are marked as lost."""
    is_given_up = given_up(metadata)
    return frozenset(each for each in entries if not is_given_up(each))


def with_lost(metadata: LedgerMetadata, entries: Iterable[EntryId]) -> LedgerMetadata:
    """Return a copy of the ledger's metadata in which exactly these entries are marked as lost."""
    others = tuple((key, value) for key, value in metadata.custom if key != LOST_KEY)
    text = text_of(runs_of(entries))
    return replace(metadata, custom=tuple(sorted((*others, (LOST_KEY, text.encode())))) if text else others)


def runs_of(entries: Iterable[EntryId]) -> list[range]:
    """Return the entries as ascending ranges of consecutive entries."""
    found: list[range] = []
    for entry in sorted(entries):
        if found and found[-1].stop == entry:
            found[-1] = range(found[-1].start, entry + 1)
        else:
            found.append(range(entry, entry + 1))
    return found


def text_of(runs: Iterable[range]) -> str:
    return ",".join(f"{run.start}" if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)
