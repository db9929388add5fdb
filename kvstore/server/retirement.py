"""Removes what a retired partition has left behind: its log and its znodes. Every step can be done again."""

from __future__ import annotations

import logging
from contextlib import suppress

from kvstore.errors import NoSuchLedger, NoSuchNode, NotEmpty, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerManager
from kvstore.meta.store import MetadataStore
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.creator import owner_of
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)


async def remove_log(store: MetadataStore, partition: PartitionId, *, now_ms: int) -> bool:
    """Delete a retired partition's ledgers and znodes. False, and nothing done, while a replica is up or a pin holds
    its log. Raises MetadataError."""
    if await _is_in_use(store, partition, now_ms):
        return False
    lists, ledgers = LedgerLists(store), LedgerManager(store)
    listed, version = await lists.read(partition, latest=True)
    gone = [each.id for each in listed.ledgers]
    if gone:
        try:
            await lists.write(partition, LedgerList(), version)  # whoever still led it does so no more
        except VersionConflict:
            return False  # somebody leads it
    for ledger in sorted({*gone, *await _made_for(ledgers, partition)}):
        await ledgers.remove(ledger, -1)
    await _remove_tree(store, paths.partition(partition))
    log.info("partition=%s: %d ledgers and its znodes removed", partition, len(gone))
    return True


async def _is_in_use(store: MetadataStore, partition: PartitionId, now_ms: int) -> bool:
    if await Pins(store, LedgerLists(store)).oldest(partition, now_ms) is not None:
        return True
    with suppress(NoSuchNode):
        await store.get(paths.partition_leader(partition))
        return True
    with suppress(NoSuchNode):
        return bool(await store.children(paths.partition_replicas(partition)))
    return False


async def _made_for(ledgers: LedgerManager, partition: PartitionId) -> list[LedgerId]:
    """Its ledgers, also those that its list does not name (any more)."""
    found = []
    for ledger in await ledgers.list_ids():
        with suppress(NoSuchLedger):
            metadata, _ = await ledgers.read(ledger)
            if owner_of(metadata) == partition:
                found.append(ledger)
    return found


async def _remove_tree(store: MetadataStore, path: str) -> None:
    with suppress(NoSuchNode):
        for name in await store.children(path):
            await _remove_tree(store, paths.join(path, name))
        with suppress(NotEmpty):  # a replica has come up; the next round removes what it leaves
            await store.delete(path, -1)
