"""Changes of its ledger's metadata that a writer may make. Decides only: functions for the compare-and-set loop, which
raise when the ledger is not the writer's any more (docs/protocol.md W4, W9)."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import LedgerClosed, LedgerFenced
from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState


def with_swaps(
    recorded: LedgerMetadata, mine: LedgerMetadata, first: EntryId, swapped: Mapping[BookieId, BookieId]
) -> LedgerMetadata:
    """`recorded` with bookies replaced from `first` on. `mine` is the metadata as this writer last knew it.

    Finds its own work done after a write of unknown outcome, keeps what a re-replication did to older fragments, and
    raises LedgerFenced or LedgerClosed if the ledger is not open or its last ensemble is neither.
    """
    _check_open(recorded)
    ensemble = tuple(swapped.get(bookie, bookie) for bookie in mine.fragments[-1].ensemble)
    last = recorded.fragments[-1]
    if last.first == first and last.ensemble == ensemble:
        return recorded
    if last != mine.fragments[-1]:
        raise LedgerFenced(f"ledger {mine.ledger}: another hand changed its last ensemble to {last}")
    return recorded.with_ensemble(first, ensemble)


def closed_by_writer(
    recorded: LedgerMetadata, mine: LedgerMetadata, last_entry: EntryId, length: int
) -> LedgerMetadata:
    """`recorded` closed where its writer ended. A ledger in recovery belongs to the recovery; one that is closed at the
    same place is fine, at another is not."""
    if recorded.state is LedgerState.CLOSED and (recorded.last_entry, recorded.length) == (last_entry, length):
        return recorded
    _check_open(recorded)
    if recorded.fragments[-1] != mine.fragments[-1]:
        raise LedgerFenced(f"ledger {mine.ledger}: another hand changed its last ensemble")
    return recorded.closed(last_entry, length)


def in_recovery(recorded: LedgerMetadata) -> LedgerMetadata:
    """`recorded` taken over; as it is if it was before, or is closed."""
    return recorded.recovering() if recorded.state is LedgerState.OPEN else recorded


def _check_open(recorded: LedgerMetadata) -> None:
    if recorded.state is LedgerState.CLOSED:
        raise LedgerClosed(f"ledger {recorded.ledger} was closed at {recorded.last_entry} by another hand")
    if recorded.state is not LedgerState.OPEN:
        raise LedgerFenced(f"ledger {recorded.ledger} is being recovered")
