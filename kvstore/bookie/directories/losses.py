"""Puts everything that a lost directory may have held in limbo, before the bookie that continues without it answers
anybody. The loss of each kind of record, and why no answer is wrong (docs/protocol.md, B23):

  entries       The bookie must not deny them: a recovery would end the ledger before acknowledged entries. The
                other directories know their own ledgers, and a ledger is in one directory only. For every
                other ledger whose metadata names this bookie, a remaining directory records that it is in
                limbo. All these records are on disk before the bookie answers anything.
  fences        A fencing recovery has marked the ledger IN_RECOVERY before. The lost directory's admissions are
                gone with it, so each writer of its ledgers is judged again by the metadata, which has that
                mark (B3). Nobody has to find the fence again. If a remaining directory has an admission of a
                ledger, it also has the ledger's fence.
  tombstones    Their ledgers have no metadata, so a late add is refused (B4).
  keys          The metadata store is asked (B13).
  confirmed     An explicit last-add-confirmed only reports what others have stored.

The loss is recorded in the files of all other directories before anything else happens, so the lost directory never
comes back. Otherwise its contents would be outdated, a ledger would be in two directories, and an admission in it would
not know a later fence.

After a crash, everything is found and recorded again: there is one record for each ledger, and the directories are
marked GONE only when all records are on disk.
"""

from __future__ import annotations

import logging

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.directories.homes import LedgerDirectories
from kvstore.bookie.journal.reserve import JournalFull
from kvstore.bookie.upkeep.limbo import may_name
from kvstore.errors import ConfigError
from kvstore.types import BookieId, LedgerId

log = logging.getLogger(__name__)

NOTES_MAX = 1_000
"""Number of records that share a sync."""


# docs/protocol.md B23
async def doubt_what_was_lost(homes: LedgerDirectories, authority: MetadataAuthority, bookie: BookieId) -> None:
    """Put every ledger that names the bookie, and that no directory knows, in limbo, on disk.

    Raises ConfigError if there is no space for that, MetadataError.
    """
    count = 0
    for ledger in await authority.ledgers():
        if homes.knows(ledger) or not await may_name(authority, LedgerId(ledger), bookie):
            continue
        storage = homes.chosen(ledger).storage
        try:
            storage.facts.set_limbo(storage.inventory.known(ledger), True)
        except JournalFull as error:
            raise ConfigError(
                f"bookie {bookie} has no space to record the ledgers in limbo: free some, or add a directory to "
                "storage.journal_dirs"
            ) from error
        count += 1
        if count % NOTES_MAX == 0:
            await homes.synced()
    await homes.synced()
    log.warning("ledgers may lack records ledgers=%d", count)
