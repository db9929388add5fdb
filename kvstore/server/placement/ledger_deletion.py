"""Deletes a ledger when an operator asks, unless somebody needs it, or may by the time of the delete."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from kvstore.errors import InvalidRequest, MetadataError, NoSuchLedger, NoSuchNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import Check, Delete, MetadataStore
from kvstore.server.placement.retirement import kept_ledgers
from kvstore.types import LedgerId, PartitionId
from kvstore.wal.creator import owner_of
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins


class LedgerDeletion:
    """The delete of one ledger in a cluster with these partitions. Calls raise NoSuchLedger, UndecodableNode,
    MetadataError."""

    def __init__(self, store: MetadataStore, ledger: LedgerId, partitions: Collection[PartitionId]) -> None:
        self._store, self._ledger, self._partitions = store, ledger, partitions
        self._ledgers, self._lists = LedgerStore(store), LedgerLists(store)

    # docs/protocol.md G15
    async def check(self) -> tuple[PartitionId | None, int]:
        """The partition for whose log it was made, and the version of that log's list. Raises InvalidRequest if a log
        has the ledger, that of a partition which has left too, or a pin holds it.

        Lists first: whoever creates a pin reads the list then, and a log that leaves is set apart with it.
        """
        metadata, _ = await self._ledgers.read_latest(self._ledger)
        owner, version = owner_of(metadata), -1
        for partition in sorted({*self._partitions, *([owner] if owner is not None else [])}):
            listed, found = await self._lists.read(partition, latest=True)
            version = found if partition == owner else version
            if listed.names(self._ledger):
                raise InvalidRequest(f"ledger {self._ledger} is part of the log of partition {partition}")
        await self._store.sync(paths.KEPT)
        if self._ledger in await kept_ledgers(self._store):
            raise InvalidRequest(
                f"ledger {self._ledger} is part of the log of partition {owner}, which has left the ring: readers of "
                "feeds may need it, and it goes by itself"
            )
        pinned = None if owner is None else await Pins(self._store, self._lists).oldest(owner, 0)
        if pinned is not None and self._ledger >= pinned:
            raise InvalidRequest(
                f"ledger {self._ledger} of partition {owner} is held by a pin (a snapshot, a feed or a move): it goes "
                "by itself when that ends"
            )
        return owner, version

    # docs/protocol.md G15
    async def commit(self, version: int) -> None:
        """Delete it if its metadata have that version and all of `check` holds still. Raises VersionConflict if the
        metadata, or the list of its log, are changed meanwhile: a leader may just be listing it."""
        owner, listed = await self.check()
        if owner is None or listed < 0:
            await self._ledgers.remove(self._ledger, version)
            return
        try:
            await self._store.multi(
                [Check(paths.partition_log(owner), listed), Delete(paths.ledger(self._ledger), version)]
            )
        except (VersionConflict, NoSuchNode):
            raise VersionConflict(
                f"ledger {self._ledger}, or the log of partition {owner}, has just been changed: it may be needed"
            ) from None
        with suppress(MetadataError, NoSuchLedger):
            await self._ledgers.remove(self._ledger, -1)  # its empty parents
