"""The changes that a writer may make to its ledger's metadata. Decides only. The functions are passed to a
compare-and-set loop, and raise if the ledger no longer belongs to the writer (docs/protocol.md W4, W9)."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import LedgerClosed, LedgerFenced
from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState


def with_swaps(
    recorded: LedgerMetadata, mine: LedgerMetadata, first: EntryId, swapped: Mapping[BookieId, BookieId]
) -> LedgerMetadata:
    """Return `recorded` with the bookies in `swapped` replaced from entry `first` on. `mine` is the metadata as this
    writer last knew it.

    The function recognizes its own change after a write of unknown outcome, and keeps changes that a re-replication has
    made to older fragments. Raises LedgerFenced or LedgerClosed if the ledger is not open, or if its last ensemble is
    neither the writer's nor the result of this change.
    """
    _check_open(recorded)
    ensemble = tuple(swapped.get(bookie, bookie) for bookie in mine.fragments[-1].ensemble)
    last = recorded.fragments[-1]
    if last.first == first and last.ensemble == ensemble:
        return recorded
    if last != mine.fragments[-1]:
        raise LedgerFenced(f"ledger {mine.ledger}: another writer changed its last ensemble to {last}")
    return recorded.with_ensemble(first, ensemble)


def closed_by_writer(
    recorded: LedgerMetadata, mine: LedgerMetadata, last_entry: EntryId, length: int
) -> LedgerMetadata:
    """Return `recorded` closed at `last_entry` with `length` payload bytes. A ledger that is already closed with the
    same end is returned unchanged. Raises LedgerClosed if it is closed with another end, and LedgerFenced if it is in
    recovery or another writer has changed its last ensemble."""
    if recorded.state is LedgerState.CLOSED and (recorded.last_entry, recorded.length) == (last_entry, length):
        return recorded
    _check_open(recorded)
    if recorded.fragments[-1] != mine.fragments[-1]:
        raise LedgerFenced(f"ledger {mine.ledger}: another writer changed its last ensemble")
    return recorded.closed(last_entry, length)


def in_recovery(recorded: LedgerMetadata) -> LedgerMetadata:
    """Return `recorded` in recovery. A ledger that is already in recovery or closed is returned unchanged."""
    return recorded.recovering() if recorded.state is LedgerState.OPEN else recorded


def _check_open(recorded: LedgerMetadata) -> None:
    if recorded.state is LedgerState.CLOSED:
        raise LedgerClosed(f"ledger {recorded.ledger} was closed at entry {recorded.last_entry} by another writer")
    if recorded.state is not LedgerState.OPEN:
        raise LedgerFenced(f"ledger {recorded.ledger} is being recovered")
