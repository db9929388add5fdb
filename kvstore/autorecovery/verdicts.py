"""Verdicts on a ledger's copies, and when to check. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState
from kvstore.wal.repair import bookies_of


def lost_of(metadata: LedgerMetadata, lost: Collection[BookieId]) -> list[BookieId]:
    """Return the lost bookies that the ledger names."""
    return [bookie for bookie in bookies_of(metadata) if bookie in lost]


# docs/protocol.md A7
def last_to_check(metadata: LedgerMetadata) -> EntryId:
    """Return the last entry of which every copy should exist, or NO_ENTRY if there is none. The last fragment of an
    open ledger is left out, because its entries may still be on their way."""
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry
    return EntryId(metadata.fragments[-1].first - 1)


def is_due(checked_ms: int | None, now_ms: int, interval_s: float) -> bool:
    """Return True if a check is due that was last completed at `checked_ms`. A time in the future comes from a wrong
    clock and must not delay the check."""
    return checked_ms is None or not 0 <= now_ms - checked_ms < interval_s * 1000
