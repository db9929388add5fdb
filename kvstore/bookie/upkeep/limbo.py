"""Resolves doubts after damage that may concern any ledger. It finds out which ledgers the damage may concern, so that
new ledgers are not doubted, and ends the doubt of each ledger once it certainly lacks nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

from kvstore.bookie.authority import MetadataAuthority
from kvstore.bookie.fencing import names
from kvstore.bookie.journal.record import CLEARED, RecordKind
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.storage import BookieStorage
from kvstore.errors import MetadataError, UndecodableNode
from kvstore.meta.lost import lost_entries
from kvstore.types import BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState

log = logging.getLogger(__name__)

RETRY_S = 5.0
SETTLE_S = 10.0
"""Seconds between two checks of the ledgers in limbo."""


Elsewhere = Callable[[int], bool]
"""Returns True if another directory of the bookie has the ledger, so that none of its records were in this
directory."""


def nowhere(_ledger: int) -> bool:
    """Return False; used if the bookie has only one directory."""
    return False


async def record_doubts(storage: BookieStorage) -> None:
    """Record that the ledgers known here are in limbo, and that no others are. Returns once that is on disk. Raises
    JournalFull or OSError."""
    for _, found in sorted(storage.inventory.ledgers.items()):
        storage.facts.set_limbo(found, True)
    storage.journal.append(RecordKind.LIMBO, CLEARED, -1, -1, b"", use=Use.FACT)
    await storage.synced()


async def record_nothing(_storage: BookieStorage) -> None:
    """Record nothing; used if the directory has failed. Its next start repeats the survey."""


RecordDoubts = Callable[[BookieStorage], Awaitable[None]]


async def survey(
    storage: BookieStorage,
    authority: MetadataAuthority,
    is_elsewhere: Elsewhere = nowhere,
    record: RecordDoubts = record_doubts,
) -> None:
    """Put every ledger that names this bookie or is known here in limbo, then end the limbo of all others. A ledger
    created after the survey began has lost nothing. Returns once `record` has recorded the result."""
    while storage.inventory.is_limbo:
        try:
            await _survey(storage, authority, is_elsewhere, record)
            return
        except (MetadataError, JournalFull, OSError) as error:
            log.warning("survey of ledgers that may lack records failed, retrying error=%r", error)
            await asyncio.sleep(RETRY_S)


async def _survey(
    storage: BookieStorage, authority: MetadataAuthority, is_elsewhere: Elsewhere, record: RecordDoubts
) -> None:
    inventory = storage.inventory
    for ledger in await authority.ledgers():
        is_unknown = ledger not in inventory.ledgers and ledger not in inventory.tombstones
        if not is_unknown or is_elsewhere(ledger) or not await may_name(authority, LedgerId(ledger), storage.bookie):
            continue
        if not is_elsewhere(ledger):  # it may have come there meanwhile
            inventory.known(ledger)
    await record(storage)
    inventory.set_limbo(False)
    log.warning("ledgers may lack records ledgers=%d", len(inventory.ledgers))


async def may_name(authority: MetadataAuthority, ledger: LedgerId, bookie: BookieId) -> bool:
    """Return True if the ledger's metadata names the bookie. Unreadable metadata may name it, so the ledger is doubted
    (B7)."""
    try:
        metadata = await authority.metadata(ledger)
    except UndecodableNode as error:
        log.warning("ledger may name this bookie ledger=%d error=%s", ledger, error)
        return True
    return metadata is not None and names(metadata, bookie)


async def watch(storage: BookieStorage, authority: MetadataAuthority, is_elsewhere: Elsewhere = nowhere) -> None:
    """Survey, then end the limbo of one ledger after the other as they are repaired. Runs until cancelled, because a
    ledger may enter limbo at any time."""
    await survey(storage, authority, is_elsewhere)
    while True:
        await asyncio.sleep(SETTLE_S)
        try:
            await settle(storage, authority)
        except (MetadataError, JournalFull, OSError) as error:
            log.warning("check of ledgers in limbo failed, retrying error=%r", error)


async def settle(storage: BookieStorage, authority: MetadataAuthority) -> list[LedgerId]:
    """End the limbo of every ledger that certainly lacks nothing here, and return these ledgers. Only closed ledgers
    qualify, because their metadata says which entries exist. Leaders copy missing entries to this bookie. Deleted
    ledgers are left to the reclaimer, which verifies the deletion. Raises MetadataError or JournalFull."""
    inventory, settled = storage.inventory, []
    for ledger in sorted(each for each, found in inventory.ledgers.items() if found.is_limbo):
        try:
            metadata = await authority.metadata(LedgerId(ledger))
        except UndecodableNode as error:
            log.warning("ledger stays in limbo ledger=%d error=%s", ledger, error)
            continue
        found = inventory.ledgers.get(ledger)
        if metadata is None or found is None or inventory.is_limbo:
            continue
        if is_complete(metadata, storage.bookie, inventory.runs(found)):
            storage.facts.set_limbo(found, False)
            settled.append(LedgerId(ledger))
            log.info("ledger is out of limbo ledger=%d", ledger)
    if settled:
        await storage.synced()
    return settled


def is_complete(metadata: LedgerMetadata, bookie: BookieId, runs: Sequence[tuple[int, int]]) -> bool:
    """Return True if `runs`, in ascending order as (first, count), contain all entries of a closed ledger that this
    bookie should have. Abandoned entries, which no bookie has, are not required (docs/protocol.md, A14)."""
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
    """Yield the parts of first ≤ entry < end that no run covers, as (first, end)."""
    at = first
    for begin, count in runs:
        if begin >= end:
            break
        if begin > at:
            yield at, begin
        at = max(at, begin + count)
    if at < end:
        yield at, end
