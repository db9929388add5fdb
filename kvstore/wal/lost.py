"""Entries of a ledger that were given up: noted in its custom metadata, so that nobody looks for copies of them again.
Decides only.

value := range *("," range)      range := first ["-" last]      rising, in decimal; both ends included
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from kvstore.types import EntryId, LedgerMetadata

LOST_KEY = "kvstore-lost"


def lost_entries(metadata: LedgerMetadata) -> list[range]:
    """The entries that were given up. None, if what is noted cannot be read."""
    found = []
    for key, value in metadata.custom:
        try:
            for part in value.decode().split(",") if key == LOST_KEY else ():
                first, _, last = part.partition("-")
                found.append(range(int(first), int(last or first) + 1))
        except ValueError:
            return []
    return found


def without_lost(metadata: LedgerMetadata, entries: Collection[EntryId]) -> frozenset[EntryId]:
    """Those of the entries that were not given up."""
    lost = lost_entries(metadata)
    return frozenset(each for each in entries if not any(each in part for part in lost))


def with_lost(metadata: LedgerMetadata, entries: Iterable[EntryId]) -> LedgerMetadata:
    """The same ledger with these entries given up, and no others."""
    others = tuple((key, value) for key, value in metadata.custom if key != LOST_KEY)
    text = text_of(runs_of(entries))
    return replace(metadata, custom=tuple(sorted((*others, (LOST_KEY, text.encode())))) if text else others)


def runs_of(entries: Iterable[EntryId]) -> list[range]:
    """The entries as rows of neighbours, rising."""
    found: list[range] = []
    for entry in sorted(entries):
        if found and found[-1].stop == entry:
            found[-1] = range(found[-1].start, entry + 1)
        else:
            found.append(range(entry, entry + 1))
    return found


def text_of(runs: Iterable[range]) -> str:
    return ",".join(f"{run.start}" if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)
