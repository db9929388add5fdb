"""Drops old ledgers of a partition's log, and sweeps what crashes have left behind (docs/protocol.md G6, G15)."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

from kvstore.env.ports import Clock
from kvstore.errors import MetadataError, NoSuchLedger, NoSuchNode, UndecodableNode, VersionConflict
from kvstore.meta import paths
from kvstore.meta.ledgers import LedgerStore
from kvstore.meta.store import Check, Delete, MetadataStore
from kvstore.types import EntryId, LedgerId, LedgerMetadata, LedgerState, PartitionId, Seq
from kvstore.wal.creator import owner_of
from kvstore.wal.ledger_list import LedgerList
from kvstore.wal.pins import Pins

log = logging.getLogger(__name__)

OWNERS_MAX = 100_000
"""Ledgers of others that a sweep remembers, to read each one's metadata once."""

TRIMMED_MAX = 256
"""Ledgers that are taken off a list at once, some five round trips each: the leader has other duties, and an error in
between begins again."""

UNDECODABLE_MAX = 1_000
"""Ledgers that are remembered and logged as such."""


class ListOwner(Protocol):
    """The leader's hold on its list."""

    partition: PartitionId
    listed: LedgerList
    version: int

    async def drop_first(self, ends: list[EntryId]) -> None:
        """Take the oldest ledgers, which end at `ends`, out of the list. Raises LedgerFenced if the list is lost."""
        ...


class Trimmer:
    """Trims one leader's log."""

    def __init__(
        self, owner: ListOwner, *, store: MetadataStore, ledgers: LedgerStore, pins: Pins, clock: Clock
    ) -> None:
        self._owner = owner
        self._store = store
        self._ledgers = ledgers
        self._pins = pins
        self._clock = clock
        self._of_others: set[LedgerId] = set()
        self.undecodable: set[LedgerId] = set()
        """Ledgers whose metadata could not be read."""

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        """List first, then pins, then delete; see LeaderLog. Returns how many ledgers left the list."""
        partition = self._owner.partition
        now_ms = self._clock.passed_ms()
        pinned = await self._pins.oldest(partition, now_ms)
        gone = self._owner.listed.trimmable(durable_seq, pinned)
        ends = await self._ends(gone, closed_before_ms=now_ms - older_than_ms)
        ends = ends[: self._owner.listed.droppable(len(ends))]
        if not ends:
            return 0
        await self._owner.drop_first(ends)
        pinned = await self._pins.oldest(partition, now_ms)
        for ledger in gone[: len(ends)]:
            if pinned is not None and ledger >= pinned:
                break  # the sweep takes it when the pin is gone
            log.info("partition=%s ledger=%d trimmed below seq=%d", partition, ledger, durable_seq + 1)
            await self._ledgers.remove(ledger, -1)
        return len(ends)

    async def _ends(self, ledgers: list[LedgerId], closed_before_ms: int) -> list[EntryId]:
        """Last entries of the first ones that are closed since before then, by the metadata store's date and by that of
        whoever made the next one (docs/protocol.md, P31)."""
        ends: list[EntryId] = []
        listed = self._owner.listed
        metadata: LedgerMetadata | None = None
        for this, following in pairwise(each.id for each in listed.ledgers[: len(ledgers) + 1]):  # there is one: G6
            if len(ends) >= TRIMMED_MAX and listed.droppable(len(ends)):
                break  # the next look goes on
            _, stat = await self._store.get(paths.ledger(this))
            metadata = metadata or await self._read_or_none(this)
            after = metadata and await self._read_or_none(following)
            if metadata is None or after is None:
                break  # where it ends is not known, and what is behind it cannot go before it
            if metadata.state is not LedgerState.CLOSED or max(stat.modified_ms, after.ctime_ms) > closed_before_ms:
                break
            ends.append(metadata.last_entry)
            metadata = after
        return ends

    async def _read_or_none(self, ledger: LedgerId) -> LedgerMetadata | None:
        try:
            return (await self._ledgers.read(ledger))[0]
        except UndecodableNode as error:
            self._pass_over(ledger, error)
            return None

    async def sweep(self, older_than_ms: int) -> int:
        """Delete ledgers that were made for this log longer ago and that neither its list nor a pin names; returns how
        many.

        Each delete checks the list's version in the same transaction, so that a slow leader cannot list what is
        deleted.
        """
        owner = self._owner
        before_ms = self._clock.passed_ms() - older_than_ms
        count = 0
        listed = {each.id for each in owner.listed.ledgers}
        for ledger in await self._ledgers.list_ids():
            if ledger in self._of_others or ledger in listed:
                continue
            with suppress(NoSuchLedger, NoSuchNode, VersionConflict):
                try:
                    count += await self._sweep(ledger, before_ms)
                except UndecodableNode as error:
                    self._pass_over(ledger, error)
        return count

    def _pass_over(self, ledger: LedgerId, error: UndecodableNode) -> None:
        """It may be anybody's: nothing is done to it, and the others are looked at (docs/protocol.md, P34)."""
        if ledger not in self.undecodable and len(self.undecodable) < UNDECODABLE_MAX:
            log.error("%s; it is passed over", error)
            self.undecodable.add(ledger)

    async def _sweep(self, ledger: LedgerId, before_ms: int) -> int:
        owner = self._owner
        metadata, version = await self._ledgers.read(ledger)
        if owner_of(metadata) != owner.partition:
            if len(self._of_others) < OWNERS_MAX:
                self._of_others.add(ledger)
            return 0
        pinned = await self._pins.oldest(owner.partition, self._clock.passed_ms())
        if metadata.ctime_ms > before_ms or (pinned is not None and ledger >= pinned) or owner.listed.names(ledger):
            return 0
        check = Check(paths.partition_log(owner.partition), owner.version)
        await self._store.multi([check, Delete(paths.ledger(ledger), version)])
        log.info("partition=%s ledger=%d was an orphan: deleted", owner.partition, ledger)
        with suppress(MetadataError):
            await self._ledgers.remove(ledger, -1)  # its empty parents
        return 1
