"""Deletes old ledgers of a partition's log, and sweeps orphans that crashes have left behind (docs/protocol.md G6,
G15)."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple, Protocol

from kvstore.env.ports import Clock
from kvstore.errors import (
    MetadataError,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchNode,
    UndecodableNode,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import Check, Delete, MetadataStore
from kvstore.types import NO_ENTRY, EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Seq
from kvstore.wal.creator import owner_of
from kvstore.wal.leading.owners import LedgerOwners
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)

TRIMMED_MAX = 256
"""Maximum number of ledgers removed from a list at once, at about five round trips each. The limit leaves time for the
leader's other duties, and bounds the work that an error repeats."""

UNDECODABLE_MAX = 1_000
"""Maximum number of undecodable ledgers that are remembered and logged."""


class ListOwner(Protocol):
    """Gives the trimmer access to the leader's ledger list."""

    partition: PartitionId
    listed: LedgerList
    version: int

    async def drop_first(self, ends: list[EntryId]) -> None:
        """Remove the oldest `len(ends)` ledgers from the list. `ends` are their last entries. Raises LedgerFenced if
        another leader has changed the list."""
        ...


class _ListedLedgerState(NamedTuple):
    """The state of a listed ledger in the metadata store."""

    metadata: LedgerMetadata | None
    """None if the ledger is gone."""
    modified_ms: int


class Trimmer:
    """Trims one leader's log and sweeps its orphans."""

    def __init__(
        self,
        owner: ListOwner,
        *,
        store: MetadataStore,
        ledgers: LedgerStore,
        pins: Pins,
        clock: Clock,
        owners: LedgerOwners,
    ) -> None:
        self._owner = owner
        self._store = store
        self._ledgers = ledgers
        self._pins = pins
        self._clock = clock
        self._owners = owners
        self.undecodable: set[LedgerId] = set()
        """Ledgers whose metadata could not be read."""
        self.deleted: set[LedgerId] = set()
        """Listed ledgers that another process has deleted."""

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        """Trim the log as LeaderLog.trim describes, in the order list, pins, deletion. Returns the number of ledgers
        removed from the list."""
        partition = self._owner.partition
        now_ms = self._clock.passed_ms()
        pinned = await self._pins.oldest(partition, now_ms)
        gone = self._owner.listed.trimmable(durable_seq, pinned)
        ends = await self._ends(gone, now_ms, closed_before_ms=now_ms - older_than_ms)
        ends = ends[: self._droppable(ends)]
        if not ends:
            return 0
        await self._owner.drop_first([NO_ENTRY if end is None else end for end in ends])
        pinned = await self._pins.oldest(partition, now_ms)
        for ledger in gone[: len(ends)]:
            if pinned is not None and ledger >= pinned:
                break  # the sweep deletes it when the pin is gone
            log.info("ledger trimmed partition=%s ledger=%d below_seq=%d", partition, ledger, durable_seq + 1)
            await self._ledgers.remove(ledger, -1)
        return len(ends)

    def _droppable(self, ends: list[EntryId | None]) -> int:
        """Return the number of ledgers that can be removed from the beginning of the list. A deleted ledger can be
        removed only together with a later one that has entries. The list then records where the trimmed part ends, so
        that a replica positioned there can continue."""
        count = self._owner.listed.droppable(len(ends))
        while next((end for end in reversed(ends[:count]) if end != NO_ENTRY), NO_ENTRY) is None:
            count = self._owner.listed.droppable(count - 1)
        return count

    # docs/protocol.md P31
    async def _ends(self, ledgers: list[LedgerId], now_ms: int, closed_before_ms: int) -> list[EntryId | None]:
        """Return the last entries of the first ledgers that were closed before `closed_before_ms`, by both the metadata
        store's time and the time of the leader that created the next ledger; None for a ledger that somebody has
        deleted. A ledger without a time, or with one in the future, is as old as the next ledger with both times,
        because its entries were there before that one's."""
        ends: list[EntryId | None] = []
        old = 0
        listed = self._owner.listed
        found: _ListedLedgerState | None = None
        # there is a next one: G6
        for this, following in pairwise(each.id for each in listed.ledgers[: len(ledgers) + 1]):
            if old >= TRIMMED_MAX and listed.droppable(old):
                break  # the next run continues
            found = found or await self._find(this)
            after = found and await self._find(following)
            if found is None or after is None:
                break  # its end is unknown, and later ledgers cannot be removed before it
            if found.metadata is not None and found.metadata.state is not LedgerState.CLOSED:
                break
            ends.append(None if found.metadata is None else found.metadata.last_entry)
            if found.metadata is not None and after.metadata is not None:
                date_ms = max(found.modified_ms, after.metadata.ctime_ms)
                if date_ms <= closed_before_ms:
                    old = len(ends)
                elif date_ms <= now_ms:
                    break
            found = after
        return ends[:old]

    async def _find(self, ledger: LedgerId) -> _ListedLedgerState | None:
        """Return the state of a ledger, or None if its metadata cannot be decoded. Raises MetadataError."""
        try:
            _, stat = await self._store.get(paths.ledger(ledger))
            return _ListedLedgerState((await self._ledgers.read(ledger))[0], stat.modified_ms)
        except UndecodableNode as error:
            self._pass_over(ledger, error)
            return None
        except (NoSuchNode, NoSuchLedger):
            return await self._deleted(ledger)

    # docs/protocol.md G6
    async def _deleted(self, ledger: LedgerId) -> _ListedLedgerState:
        """Return the state of a deleted ledger. Raises NoSuchLedger if another leader may have trimmed it."""
        with suppress(NoSuchLedger):
            metadata, _ = await self._ledgers.read_latest(ledger)
            raise MetadataUnavailable(f"ledger {metadata.ledger}: the metadata store returned it only after a sync")
        owner = self._owner
        _, stat = await self._store.get(paths.partition_log(owner.partition))
        if stat.version != owner.version:
            raise NoSuchLedger(f"ledger {ledger} does not exist, and partition {owner.partition} has another list")
        if ledger not in self.deleted and len(self.deleted) < UNDECODABLE_MAX:
            self.deleted.add(ledger)
            log.error(
                "somebody has deleted a listed ledger; it is removed from the list with the ledgers around it "
                "partition=%s ledger=%d",
                owner.partition,
                ledger,
            )
        return _ListedLedgerState(None, 0)

    async def sweep(self, older_than_ms: int) -> int:
        """Delete ledgers that were created for this log before that time and that neither its list nor a pin names.
        Return their number.

        Each delete checks the list's version in the same transaction, so that a slow leader cannot list a deleted
        ledger.
        """
        async with self._owners.sweeping:
            return await self._sweep_all(self._clock.passed_ms() - older_than_ms)

    async def _sweep_all(self, before_ms: int) -> int:
        count, partition = 0, self._owner.partition
        listed = {each.id for each in self._owner.listed.ledgers}
        ids = await self._ledgers.list_ids()
        self._owners.keep(set(ids))
        for ledger in ids:
            if ledger in listed or self._owners.is_anothers(ledger, partition):
                continue
            with suppress(NoSuchLedger, NoSuchNode, VersionConflict):
                try:
                    count += await self._sweep(ledger, before_ms)
                except UndecodableNode as error:
                    self._pass_over(ledger, error)
        return count

    def _pass_over(self, ledger: LedgerId, error: UndecodableNode) -> None:
        """Remember and log an undecodable ledger. It may belong to anyone, so it is left alone and the sweep continues
        (docs/protocol.md, P34)."""
        if ledger not in self.undecodable and len(self.undecodable) < UNDECODABLE_MAX:
            log.error("undecodable ledger skipped error=%s", error)
            self.undecodable.add(ledger)

    async def _sweep(self, ledger: LedgerId, before_ms: int) -> int:
        owner = self._owner
        metadata, version = await self._ledgers.read(ledger)
        self._owners.note(ledger, owner_of(metadata))
        if owner_of(metadata) != owner.partition:
            return 0
        pinned = await self._pins.oldest(owner.partition, self._clock.passed_ms())
        if metadata.ctime_ms > before_ms or (pinned is not None and ledger >= pinned) or owner.listed.names(ledger):
            return 0
        check = Check(paths.partition_log(owner.partition), owner.version)
        await self._store.multi([check, Delete(paths.ledger(ledger), version)])
        log.info("orphan deleted partition=%s ledger=%d", owner.partition, ledger)
        with suppress(MetadataError):
            await self._ledgers.remove(ledger, -1)  # its empty parents
        return 1
