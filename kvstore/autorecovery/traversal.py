"""Iterates over the metadata of all ledgers in the cluster, page by page at a limited rate."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kvstore.errors import NoSuchLedger, UndecodableNode
from kvstore.meta.ledgers import LedgerStore
from kvstore.types import LedgerId, LedgerMetadata

log = logging.getLogger(__name__)

READS_PER_S = 1_000
"""Maximum number of metadata reads per second. A ZooKeeper server handles about ten times as many, and other clients
need it too."""
_STEP = 50
"""Number of ledgers between two pauses."""


async def every_ledger(
    ledgers: LedgerStore, check: Callable[[], None], unreadable: Callable[[LedgerId], None] | None = None
) -> AsyncIterator[LedgerMetadata]:
    """Yield the metadata of every ledger, which may be slightly outdated. `check` is called before each ledger, and may
    raise to end the traversal. A ledger with unreadable metadata is passed to `unreadable`, or logged if that is None;
    `kvstore fsck` reports it. Raises MetadataError if the store fails, so a traversal that ends normally has covered
    all ledgers."""
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
                    log.warning("ledger not audited, its metadata is unreadable ledger=%d error=%s", ledger, error)
                else:
                    unreadable(ledger)
                continue
            yield metadata
            count += 1
            if count % _STEP == 0:
                await asyncio.sleep(_STEP / READS_PER_S)
