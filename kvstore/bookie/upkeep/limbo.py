"""After damage that may concern any ledger: finds out which those are, so that new ledgers are not doubted, and ends
the doubt of each when nothing of it can be missing any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from kvstore.bookie.admission import LedgerAuthority
from kvstore.bookie.fencing import names
from kvstore.bookie.journal.record import CLEARED, RecordKind
from kvstore.bookie.journal.room import JournalFull, Use
from kvstore.bookie.storage import BookieStorage
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.lost import lost_entries
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState

log = logging.getLogger(__name__)

RETRY_S = 5.0
SETTLE_S = 10.0
"""Between two looks at the ledgers in limbo."""


Elsewhere = Callable[[int], bool]
"""Whether another directory of the bookie has the ledger: then nothing of it was in this one."""


def nowhere(_ledger: int) -> bool:
    """The bookie has no other directory."""
    return False


async def survey(storage: BookieStorage, authority: LedgerAuthority, is_elsewhere: Elsewhere = nowhere) -> None:
    """Mark every ledger that names this bookie, or is known here, as possibly incomplete; then doubt no others.

    A ledger created after this began has lost nothing. Returns when that is done and on the disk.
    """
    while storage.inventory.is_limbo:
        try:
            await _survey(storage, authority, is_elsewhere)
            return
        except (MetadataError, JournalFull, OSError) as error:
            log.warning("the survey of ledgers that may lack records stopped: %r", error)
            await asyncio.sleep(RETRY_S)


async def _survey(storage: BookieStorage, authority: LedgerAuthority, is_elsewhere: Elsewhere) -> None:
    inventory = storage.inventory
    for ledger in await authority.ledgers():
        is_unknown = ledger not in inventory.ledgers and ledger not in inventory.tombstones
        if not is_unknown or is_elsewhere(ledger) or not await may_name(authority, LedgerId(ledger), storage.bookie):
            continue
        if not is_elsewhere(ledger):  # nor did it come there meanwhile
            inventory.known(ledger)
    for _, found in sorted(inventory.ledgers.items()):
        storage.facts.set_limbo(found, True)
    storage.journal.append(RecordKind.LIMBO, CLEARED, -1, -1, b"", use=Use.FACT)
    await storage.synced()
    inventory.set_limbo(False)
    log.warning("%d ledgers may lack records", len(inventory.ledgers))


async def may_name(authority: LedgerAuthority, ledger: LedgerId, bookie: BookieId) -> bool:
    """Whether the ledger's metadata names the bookie. One that cannot be read may: so it is doubted (B7)."""
    try:
        metadata = await authority.metadata(ledger)
    except UndecodableNode as error:
        log.warning("ledger=%d may name this bookie: %s", ledger, error)
        return True
    return metadata is not None and names(metadata, bookie)


async def watch(storage: BookieStorage, authority: LedgerAuthority, is_elsewhere: Elsewhere = nowhere) -> None:
    """Survey, then end the doubt of ledger after ledger as it is repaired. Runs for ever: a ledger may come into limbo
    at any time."""
    await survey(storage, authority, is_elsewhere)
    while True:
        await asyncio.sleep(SETTLE_S)
        try:
            await settle(storage, authority)
        except (MetadataError, JournalFull, OSError) as error:
            log.warning("the look at ledgers that may lack records stopped: %r", error)


async def settle(storage: BookieStorage, authority: LedgerAuthority) -> list[LedgerId]:
    """Take every ledger out of limbo of which nothing is missing here; returns them.

    That is certain only of a closed ledger: its metadata says which entries there are. Leaders copy to this bookie what
    it lacks. A ledger that is gone is dropped by the reclaim, which is certain of that too. Raises MetadataError,
    JournalFull.
    """
    inventory, settled = storage.inventory, []
    for ledger in sorted(each for each, found in inventory.ledgers.items() if found.is_limbo):
        try:
            metadata = await authority.metadata(LedgerId(ledger))
        except UndecodableNode as error:
            log.warning("ledger=%d stays in limbo: %s", ledger, error)
            continue
        found = inventory.ledgers.get(ledger)
        if metadata is None or found is None or inventory.is_limbo:
            continue
        if is_complete(metadata, storage.bookie, inventory.runs(found)):
            storage.facts.set_limbo(found, False)
            settled.append(LedgerId(ledger))
            log.info("ledger=%d lacks nothing here any more", ledger)
    if settled:
        await storage.synced()
    return settled


def is_complete(metadata: LedgerMetadata, bookie: BookieId, runs: Sequence[tuple[int, int]]) -> bool:
    """Whether a closed ledger's entries for which the bookie is named are all in `runs`, (first, count) rising, but for
    those that were given up: nobody has them (docs/protocol.md, A14)."""
    if metadata.state is not LedgerState.CLOSED:
        return False
    there = sorted((*runs, *((lost.start, len(lost)) for lost in lost_entries(metadata))))
    ends = [following.first for following in metadata.fragments[1:]] + [metadata.last_entry + 1]
    for fragment, end in zip(metadata.fragments, ends, strict=True):
        if bookie not in fragment.ensemble:
            continue
        for first, stop in _gaps(there, fragment.first, end):
            if any(bookie in fragment.write_set(EntryId(entry), metadata.quorum) for entry in range(first, stop)):
                return False
    return True


def _gaps(runs: Sequence[tuple[int, int]], first: int, end: int) -> Iterator[tuple[int, int]]:
    """List the parts of first ≤ entry < end that are in no run, as (first, end)."""
    at = first
    for begin, count in runs:
        if begin >= end:
            break
        if begin > at:
            yield at, begin
        at = max(at, begin + count)
    if at < end:
        yield at, end
