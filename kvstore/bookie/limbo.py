"""After damage that may concern any ledger: finds out which those are, so that new ledgers are not doubted."""

from __future__ import annotations

import asyncio
import logging

from kvstore.bookie.admission import Authority
from kvstore.bookie.fencing import names
from kvstore.bookie.journal import JournalFull
from kvstore.bookie.record import CLEARED, Kind
from kvstore.bookie.storage import BookieStorage
from kvstore.errors import Corrupted, MetadataError
from kvstore.types import LedgerId

log = logging.getLogger(__name__)

RETRY_S = 5.0


async def survey(storage: BookieStorage, authority: Authority) -> None:
    """Mark every ledger that names this bookie, or is known here, as possibly incomplete; then doubt no others.

    A ledger created after this began has lost nothing. Returns when that is done and on the disk.
    """
    while storage.inventory.is_limbo:
        try:
            await _survey(storage, authority)
            return
        except (MetadataError, Corrupted, JournalFull) as error:
            log.warning("the survey of ledgers that may lack records stopped: %r", error)
            await asyncio.sleep(RETRY_S)


async def _survey(storage: BookieStorage, authority: Authority) -> None:
    inventory = storage.inventory
    for ledger in await authority.ledgers():
        if ledger not in inventory.ledgers and ledger not in inventory.tombstones:
            metadata = await authority.metadata(LedgerId(ledger))
            if metadata is not None and names(metadata, storage.bookie):
                inventory.known(ledger)
    for _, found in sorted(inventory.ledgers.items()):
        storage.set_limbo(found, True)
    storage.journal.append(Kind.LIMBO, CLEARED, -1, -1, b"")
    await storage.synced()
    inventory.set_limbo(False)
    log.warning("%d ledgers may lack records", len(inventory.ledgers))
