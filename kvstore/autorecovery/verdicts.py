"""Decides which copies of a ledger are missing, and when a check is due. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState
from kvstore.wal.repair import bookies_of


def lost_of(metadata: LedgerMetadata, lost: Collection[BookieId]) -> list[BookieId]:
    """Return the bookies in `lost` that the ledger names."""
    return [bookie for bookie in bookies_of(metadata) if bookie in lost]


# docs/protocol.md A7
def last_to_check(metadata: LedgerMetadata) -> EntryId:
    """Return the last entry whose copies should all exist, or NO_ENTRY if there is none. The last fragment of an open
    ledger is left out, because its entries may still be in flight."""
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry
    return EntryId(metadata.fragments[-1].first - 1)


def is_due(checked_ms: int | None, now_ms: int, interval_s: float) -> bool:
    """Return True if a check that was last completed at `checked_ms` is due again. A time in the future comes from a
    wrong clock, and makes the check due."""
    return checked_ms is None or not 0 <= now_ms - checked_ms < interval_s * 1000
