"""Finds out whether the metadata store is an older copy of itself, by the ids that it has given. A restored copy counts
again from where it was made, and would give ids of ledgers that bookies have."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.bookie.admission import Authority
from kvstore.errors import ConfigError, UndecodableNode
from kvstore.meta.ledger_ids import RANGE_BITS
from kvstore.types import LedgerId

SHOWN_MAX = 5


# docs/protocol.md B29
async def refuse_older_metadata(ledgers: Iterable[int], authority: Authority) -> None:
    """Raise ConfigError if the metadata store has never given the id of one of the ledgers, which it had admitted and
    which are the cluster's own, and does not know it; and mark the store, since each look takes an id, and bookies
    without such ledgers must not go on by it either. MetadataError."""
    here = sorted(ledgers)
    newest = {ledger >> RANGE_BITS: ledger for ledger in here}
    if not any([await _is_unknown(LedgerId(ledger), authority) for ledger in newest.values()]):
        return  # so the store has given these ids, and all below; a look would use up an id that G27 goes by
    counted = await authority.counted()
    suspects = [ledger for ledger in here if counted.never_gave(ledger)]
    unknown = [ledger for ledger in suspects if await _is_unknown(LedgerId(ledger), authority)]
    if unknown:
        shown = ", ".join(map(str, unknown[:SHOWN_MAX]))
        await authority.mark_older(f"a bookie has {len(unknown)} ledgers with ids from {unknown[0]} on that it lacks")
        raise ConfigError(
            f"the metadata store is an older copy of itself: it has given ids up to {counted.to}, and does not know "
            f"{len(unknown)} ledgers that this bookie has stored ({shown}). Want a copy that does ("
            "docs/how-to/back-up-and-restore-metadata.md)"
        )


async def _is_unknown(ledger: LedgerId, authority: Authority) -> bool:
    try:
        return await authority.metadata(ledger) is None
    except UndecodableNode:
        return False
