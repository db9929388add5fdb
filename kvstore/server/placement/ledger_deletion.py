"""Deletes a ledger at an operator's request, unless the ledger is needed, or may be needed by the time it is
deleted."""

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
    """The deletion of one ledger in a cluster with the given partitions. All methods raise NoSuchLedger,
    UndecodableNode, MetadataError."""

    def __init__(self, store: MetadataStore, ledger: LedgerId, partitions: Collection[PartitionId]) -> None:
        self._store, self._ledger, self._partitions = store, ledger, partitions
        self._ledgers, self._lists = LedgerStore(store), LedgerLists(store)

    # docs/protocol.md G15
    async def check(self) -> tuple[PartitionId | None, int]:
        """Return the partition for whose log the ledger was created, and the version of that log's list. Raises
        InvalidRequest if a log contains the ledger, even the log of a partition that has left, or if a pin holds it.

        The lists are read first: a client that creates a pin reads the list after that, and a log that leaves the ring
        is kept together with its list.
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
                f"ledger {self._ledger} is part of the log of partition {owner}, which has left the ring; readers of "
                "feeds may "
                "need it, and it is removed automatically"
            )
        pinned = None if owner is None else await Pins(self._store, self._lists).oldest(owner, 0)
        if pinned is not None and self._ledger >= pinned:
            raise InvalidRequest(
                f"ledger {self._ledger} of partition {owner} is held by a pin (a snapshot, a feed or a move); it is "
                "removed "
                "automatically when the pin ends"
            )
        return owner, version

    # docs/protocol.md G15
    async def commit(self, version: int) -> None:
        """Delete the ledger if its metadata still has this version and `check` still passes. Raises VersionConflict
        if the metadata or the list of its log has changed, for example because a leader is adding the ledger to the
        list."""
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
                f"ledger {self._ledger} or the log of partition {owner} has just changed, so the ledger may be needed"
            ) from None
        with suppress(MetadataError, NoSuchLedger):
            await self._ledgers.remove(self._ledger, -1)  # its empty parents
