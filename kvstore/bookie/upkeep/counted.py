"""Finds out whether the metadata store is an older copy of itself, by the ids that it has given. A restored copy counts
again from where it was made, and would give ids of ledgers that bookies have."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.bookie.admission import Authority
from kvstore.errors import ConfigError, UndecodableNode
from kvstore.types import LedgerId

SHOWN_MAX = 5


# docs/protocol.md B29
def is_never_given(ledger: int, counted_to: int) -> bool:
    """Whether the metadata store's counter is yet to come to this id. Ids that creators choose themselves, as Apache's
    clients may, are far above it as a rule, in another range of 2^32: these say nothing."""
    return counted_to <= ledger and ledger >> 32 <= counted_to >> 32


async def refuse_older_metadata(ledgers: Iterable[int], authority: Authority) -> None:
    """Raise ConfigError if the metadata store has never given the id of one of the ledgers, which it had admitted, and
    does not know it; and mark the store, since each look takes an id, and bookies without such ledgers must not go on
    by it either. MetadataError."""
    here = sorted(ledgers)
    if not here:
        return
    counted_to = await authority.counted_to()
    suspects = [ledger for ledger in here if is_never_given(ledger, counted_to)]
    unknown = [ledger for ledger in suspects if await _is_unknown(LedgerId(ledger), authority)]
    if unknown:
        shown = ", ".join(map(str, unknown[:SHOWN_MAX]))
        await authority.mark_older(f"a bookie has {len(unknown)} ledgers with ids from {unknown[0]} on that it lacks")
        raise ConfigError(
            f"the metadata store is an older copy of itself: it has given ids up to {counted_to}, and does not know "
            f"{len(unknown)} ledgers that this bookie has stored ({shown}). Want a copy that does (docs/operations.md, "
            "An older copy of the metadata)"
        )


async def _is_unknown(ledger: LedgerId, authority: Authority) -> bool:
    try:
        return await authority.metadata(ledger) is None
    except UndecodableNode:
        return False
