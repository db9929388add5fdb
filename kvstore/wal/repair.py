"""Which copies of a ledger's entries are missing where. Decides only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.types import BookieId, EntryId, LedgerMetadata


class Missing(NamedTuple):
    """A bookie that the metadata names for an entry, and that does not have it."""

    entry: EntryId
    bookie: BookieId


def missing_copies(metadata: LedgerMetadata, last: EntryId, held: Mapping[BookieId, Sequence[int]]) -> list[Missing]:
    """By entry, for the entries up to `last`. `held`: what each bookie that could be asked has, rising; the others are
    left out."""
    found: list[Missing] = []
    quorum = metadata.quorum
    for fragment, following in zip(metadata.fragments, (*metadata.fragments[1:], None), strict=True):
        end = min(last, following.first - 1) if following else last
        for place, bookie in enumerate(fragment.ensemble):
            if bookie not in held or end < fragment.first:
                continue
            named = range(fragment.first, end + 1)
            if quorum.write == quorum.ensemble:
                wanted = set(named)
            else:
                wanted = {entry for entry in named if (place - entry) % quorum.ensemble < quorum.write}
            found += [Missing(EntryId(entry), bookie) for entry in wanted.difference(held[bookie])]
    return sorted(found)


def bookies_of(metadata: LedgerMetadata) -> list[BookieId]:
    """Every bookie that any fragment names, sorted."""
    return sorted({bookie for fragment in metadata.fragments for bookie in fragment.ensemble})
