"""Puts in limbo what a lost directory may have held, before the bookie that goes on without it answers anybody.

What is lost with a directory, and why nothing lies about it (docs/protocol.md, B23):

    entries       That they are not here must not be said: a recovery would end the ledger before what was acknowledged.
                  The others know what they have themselves; a ledger is in one directory only, so the lost one had
                  none of that. Of every other ledger whose metadata name this bookie a note goes into a directory that
                  is left: it is in limbo. All of them are on the disk before the bookie answers anybody anything.
    fences        Whoever fences has marked the ledger IN_RECOVERY before. The lost directory's admissions are gone with
                  it, so each writer of its ledgers is judged anew by the metadata, which say that (B3). Nobody has to
                  find the fence again. An admission that a directory left has is of a ledger whose fence is there too.
    tombstones    Their ledgers have no metadata: a late add is refused by that (B4).
    keys          The metadata store is asked (B13).
    confirmed     An explicit last-add-confirmed only tells of what others have stored.

That it was lost is in the files of all others before anything else happens, so it never comes back: what it had
would be out of date, a ledger would be in two directories, and an admission in it would know nothing of a later fence.

Found and noted again after a crash in the middle: it is one note for each ledger, and the directories say that they are
done with it (GONE) only when all notes are on the disks.
"""

from __future__ import annotations

import logging

from kvstore.bookie.admission import LedgerAuthority
from kvstore.bookie.directories.homes import Homes
from kvstore.bookie.journal.room import JournalFull
from kvstore.bookie.upkeep.limbo import may_name
from kvstore.errors import ConfigError
from kvstore.types import BookieId, LedgerId

log = logging.getLogger(__name__)

NOTES_MAX = 1_000
"""That share a sync."""


# docs/protocol.md B23
async def doubt_what_was_lost(homes: Homes, authority: LedgerAuthority, bookie: BookieId) -> None:
    """Put every ledger that names the bookie, and that no directory knows, in limbo, on the disks.

    Raises ConfigError if there is no room for that, MetadataError.
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
                f"bookie={bookie} has no room to note which ledgers may lack entries: make some, or add a directory to "
                "storage.journal_dirs"
            ) from error
        count += 1
        if count % NOTES_MAX == 0:
            await homes.synced()
    await homes.synced()
    log.warning("%d ledgers may lack records", count)
