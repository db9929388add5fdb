"""Goes through the metadata of every ledger of the cluster, slowly, a page at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kvstore.errors import NoSuchLedger, UndecodableNode
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import LedgerId, LedgerMetadata

log = logging.getLogger(__name__)

READS_PER_S = 1_000
"""Of metadata, at most: a ZooKeeper server does some ten times as many, and they are others'."""
_STEP = 50
"""Ledgers between two pauses."""


async def every_ledger(
    ledgers: LedgerStore, check: Callable[[], None], unreadable: Callable[[LedgerId], None] | None = None
) -> AsyncIterator[LedgerMetadata]:
    """Each ledger as it was a moment ago. `check` is asked before each and may raise. One whose metadata cannot be read
    is passed over and given to `unreadable`, or logged if nobody takes it: `kvstore fsck` names it. Raises
    MetadataError: a walk that ends has seen all."""
    count = 0
    async for page in ledgers.pages():
        for ledger in page:
            check()
            try:
                metadata, _ = await ledgers.read(ledger)
            except NoSuchLedger:
                continue
            except UndecodableNode as error:
                if unreadable is None:
                    log.warning("ledger=%d is not audited: %s", ledger, error)
                else:
                    unreadable(ledger)
                continue
            yield metadata
            count += 1
            if count % _STEP == 0:
                await asyncio.sleep(_STEP / READS_PER_S)
