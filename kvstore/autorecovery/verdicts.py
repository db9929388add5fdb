"""The verdict on a ledger's copies, and when to look. Decides only."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.types import BookieId, EntryId, LedgerMetadata, LedgerState
from kvstore.wal.repair import bookies_of


def lost_of(metadata: LedgerMetadata, lost: Collection[BookieId]) -> list[BookieId]:
    """The lost bookies that the ledger names."""
    return [bookie for bookie in bookies_of(metadata) if bookie in lost]


# docs/protocol.md A7
def last_to_check(metadata: LedgerMetadata) -> EntryId:
    """The last entry of which every copy should be there. Of a ledger that is written, the last fragment is its
    writer's: what is not there may be on its way. NO_ENTRY if there is none."""
    if metadata.state is LedgerState.CLOSED:
        return metadata.last_entry
    return EntryId(metadata.fragments[-1].first - 1)


def is_due(checked_ms: int | None, now_ms: int, interval_s: float) -> bool:
    """Whether a check that was last completed then is to be made now. A time to come is a wrong clock's: it must not
    put the check off."""
    return checked_ms is None or not 0 <= now_ms - checked_ms < interval_s * 1000
