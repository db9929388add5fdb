"""Detects from the ids that the metadata store has allocated whether the store is an older copy of itself. A restored
copy counts again from the time of the copy, and would allocate ids of ledgers that bookies already have."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.bookie.authority import MetadataAuthority
from kvstore.errors import ConfigError, UndecodableNode
from kvstore.meta.ledger_ids import RANGE_BITS
from kvstore.types import LedgerId

SHOWN_MAX = 5


# docs/protocol.md B29
async def refuse_older_metadata(ledgers: Iterable[int], authority: MetadataAuthority) -> None:
    """Raise ConfigError if the metadata store has never allocated the id of one of the ledgers and does not know the
    ledger. `ledgers` must be the cluster's own ledgers that the store had admitted. The store is then also marked as an
    older copy, because each check takes an id, and bookies without such ledgers must not use the store either. Raises
    MetadataError."""
    here = sorted(ledgers)
    newest = {ledger >> RANGE_BITS: ledger for ledger in here}
    if not any([await _is_unknown(LedgerId(ledger), authority) for ledger in newest.values()]):
        return  # so the store has given these ids and all below; a check would use up an id that G27 relies on
    counted = await authority.counted()
    suspects = [ledger for ledger in here if counted.never_gave(ledger)]
    unknown = [ledger for ledger in suspects if await _is_unknown(LedgerId(ledger), authority)]
    if unknown:
        shown = ", ".join(map(str, unknown[:SHOWN_MAX]))
        await authority.mark_older(f"a bookie has {len(unknown)} ledgers with ids from {unknown[0]} on that it lacks")
        raise ConfigError(
            f"the metadata store is an older copy of itself: it has given ids up to {counted.to}, but does not know "
            f"{len(unknown)} ledgers that this bookie has stored ({shown}). Restore a later copy "
            "(docs/how-to/back-up-and-restore-metadata.md)"
        )


async def _is_unknown(ledger: LedgerId, authority: MetadataAuthority) -> bool:
    try:
        return await authority.metadata(ledger) is None
    except UndecodableNode:
        return False
