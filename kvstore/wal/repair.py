"""Finds missing copies of a ledger's entries, and the bookies that lack them. Decides only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvstore.meta.lost import given_up
from kvstore.proto.availability import HeldEntries
from kvstore.types import BookieId, EntryId, Fragment, LedgerMetadata, Quorum

SLICE = 2_048
"""Number of entries checked in one step, which takes about a millisecond."""


class Missing(NamedTuple):
    """A missing copy: the metadata names the bookie for the entry, but the bookie does not have it."""

    entry: EntryId
    bookie: BookieId


def missing_copies(
    metadata: LedgerMetadata, last: EntryId, held: Mapping[BookieId, HeldEntries]
) -> Iterator[list[Missing]]:
    """Yield the missing copies of entries up to `last`, one list for each slice of SLICE entries, so that the caller
    can let other tasks run in between. `held` are the entries of each bookie that answered; bookies that are not in
    `held` are skipped. Abandoned entries are not reported."""
    is_given_up = given_up(metadata)
    for fragment, following in zip(metadata.fragments, (*metadata.fragments[1:], None), strict=True):
        end = min(last, following.first - 1) if following else last
        for first in range(fragment.first, end + 1, SLICE):
            found = _missing_in(range(first, min(first + SLICE, end + 1)), fragment, metadata.quorum, held)
            yield [each for each in found if not is_given_up(each.entry)]


def _missing_in(
    named: range, fragment: Fragment, quorum: Quorum, held: Mapping[BookieId, HeldEntries]
) -> list[Missing]:
    found: list[Missing] = []
    for place, bookie in enumerate(fragment.ensemble):
        if bookie not in held:
            continue
        if quorum.write == quorum.ensemble:
            wanted = set(named)
        else:
            wanted = {entry for entry in named if (place - entry) % quorum.ensemble < quorum.write}
        lacking = wanted - held[bookie].between(named[0], named[-1])
        found += [Missing(EntryId(entry), bookie) for entry in lacking]
    return sorted(found)


def entries_at_risk(
    metadata: LedgerMetadata, last: EntryId, held: Mapping[BookieId, HeldEntries]
) -> Iterator[list[EntryId]]:
    """Yield the entries up to `last` with fewer copies than the ack quorum, one list for each slice of SLICE entries.
    `held` are the entries of each bookie that may lack some; bookies that are not in `held` have all of theirs."""
    spare = metadata.quorum.write - metadata.quorum.ack
    for missing in missing_copies(metadata, last, held):
        yield [entry for entry, count in Counter(each.entry for each in missing).items() if count > spare]


def bookies_of(metadata: LedgerMetadata) -> list[BookieId]:
    """Return all bookies that the ledger's fragments name, sorted."""
    return sorted({bookie for fragment in metadata.fragments for bookie in fragment.ensemble})
