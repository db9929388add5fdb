"""Repairs one ledger by performing the commands of a RepairMachine. If the ledger has a mark, the caller must hold the
lock of the mark."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import assert_never

from kvstore.autorecovery import repair_machine
from kvstore.autorecovery.repair_machine import (
    AttemptFailed,
    AttemptHistory,
    End,
    Event,
    Fill,
    Filled,
    Gone,
    LockLost,
    MetadataRead,
    MetadataWritten,
    Overtaken,
    ProbeWriter,
    ReadMetadata,
    Recover,
    Recovered,
    RegisteredBookies,
    RepairMachine,
    WriteMetadata,
    Writer,
    WriterProbed,
    is_incarnation,
)
from kvstore.env.ports import Nursery
from kvstore.errors import (
    LedgerError,
    MetadataError,
    NoSuchLedger,
    NoSuchNode,
    NotEnoughBookies,
    VersionConflict,
)
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.proto.digest import EntryDigest
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, PartitionId
from kvstore.wal.copies.copying import Copying
from kvstore.wal.copies.pace import CopyPace, GuardedCopyPace
from kvstore.wal.creator import owner_of
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.lists import LedgerLists
from kvstore.wal.opener import LedgerTakeover
from kvstore.wal.repair import Missing, bookies_of

log = logging.getLogger(__name__)

GRACE_S = 30.0
"""See AutorecoveryConfig.open_ledger_grace_s."""

Progress = Callable[[LedgerId, EntryId, EntryId], None]
"""Called with the ledger, the entry being copied, and the ledger's last entry."""


@dataclass(frozen=True, slots=True)
class RepairOutcome:
    """The outcome of one repair attempt."""

    is_complete: bool
    reason: str
    """Reason why the ledger is still under-replicated; empty if it is not."""
    again_s: float
    """Seconds until the next attempt."""
    copied: int
    copied_bytes: int
    unreadable: frozenset[EntryId]


class LedgerRepairer:
    """Repairs ledgers on behalf of one process. Several repairs may run concurrently, and share one limit on the copy
    rate (`pace`)."""

    def __init__(
        self,
        ports: LedgerPorts,
        store: MetadataStore,
        nursery: Nursery,
        pace: CopyPace,
        *,
        grace_s: float = GRACE_S,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.ports, self.store, self.nursery, self.pace = ports, store, nursery, pace
        self.lists = LedgerLists(store)
        self.progress = progress
        self._grace_s = grace_s

    async def repair(
        self,
        ledger: LedgerId,
        marked: Collection[BookieId],
        past: AttemptHistory,
        *,
        is_held: Callable[[], bool] = lambda: True,
    ) -> RepairOutcome:
        """Make all repairs of the ledger that are possible now, and return the outcome. `marked` are the bookies that
        the mark names. `past` carries state between attempts at the same ledger. `is_held` is called before the
        metadata is written, and must return False if the lock was lost. Errors of bookies and of the metadata store end
        the attempt, and are reported in the outcome."""
        machine = RepairMachine(ledger, marked, past, grace_s=self._grace_s, luck=lambda: Random(ledger))
        attempt = _Attempt(self, ledger, is_held)
        command = machine.start()
        while not isinstance(command, End):
            event = await attempt.perform(command)
            command = machine.handle(event, self.ports.clock.now())
        command = machine.end_of(command, self.ports.choice.is_registered)
        if command.reason and command.reason != past.reason:
            log.info("ledger stays under-replicated ledger=%d reason=%s", ledger, command.reason)
        past.reason = command.reason
        done = attempt.copied, attempt.copied_bytes, attempt.unreadable
        return RepairOutcome(command.is_complete, command.reason, command.again_s, *done)

    async def is_led(self, partition: PartitionId) -> bool:
        """Return True if the partition has a leader now. Raises MetadataError."""
        path = paths.partition_leader(partition)
        await self.store.sync(path)
        return await self.created_or_none(path) is not None

    async def created_or_none(self, path: str) -> int | None:
        """Return the id of the transaction that created the node at `path`, or None if the node does not exist. Raises
        MetadataError."""
        try:
            return (await self.store.get(path))[1].created
        except NoSuchNode:
            return None

    # docs/protocol.md A13
    async def recover(self, ledger: LedgerId) -> LedgerMetadata:
        """Recover the ledger as a new leader would: fence it, find its end, wait until the former leader's lease
        expires, and close it. Returns the recorded metadata. Raises NotRecoverable, MetadataError, NoSuchLedger or
        VersionConflict."""
        takeover = LedgerTakeover(ledger, self.ports, self.nursery, trusts_all=True)  # the caller has decided
        metadata, _ = await self.ports.ledgers.read(ledger)
        await takeover.take_over()
        await self.wait_out_lease(owner_of(metadata), takeover.fenced_at)
        return await takeover.close()

    # docs/protocol.md A13
    async def wait_out_lease(self, partition: PartitionId | None, fenced_at: float) -> None:
        """Wait until the former leader's lease has expired, because the recovered entries must not be visible before.
        Returns at once if no partition owns the ledger (`partition` is None)."""
        if partition is not None:
            listed, _ = await self.lists.read(partition, latest=True)
            left_s = fenced_at + listed.lease_wait_s() - self.ports.clock.now()
            await asyncio.sleep(max(0.0, left_s))


class _Attempt:
    def __init__(self, owner: LedgerRepairer, ledger: LedgerId, is_held: Callable[[], bool]) -> None:
        self.copied = self.copied_bytes = 0
        self.unreadable: frozenset[EntryId] = frozenset()
        self._owner, self._ledger, self._is_held = owner, ledger, is_held
        self._ports = owner.ports
        self._is_deleted = False

    async def perform(
        self, command: repair_machine.ReadMetadata | ProbeWriter | Fill | WriteMetadata | Recover
    ) -> Event:
        """Perform a command and return its outcome as an event. Errors are returned as events too."""
        try:
            match command:
                case ReadMetadata():
                    return await self._read_metadata()
                case ProbeWriter(metadata, there):
                    return WriterProbed(await self._ask(metadata, there))
                case Fill():
                    return await self._fill(command)
                case WriteMetadata(wanted, version):
                    return await self._record(wanted, version)
                case Recover():
                    return await self._recover()
                case _:
                    assert_never(command)
        except NoSuchLedger:
            return Gone()
        except VersionConflict:
            return Overtaken()
        except (LedgerError, MetadataError, NotEnoughBookies) as error:
            return AttemptFailed(f"{type(error).__name__}: {error}")

    async def _read_metadata(self) -> MetadataRead:
        metadata, version = await self._ports.ledgers.read_latest(self._ledger)
        choice = self._ports.choice
        writable, readonly = choice.writable, choice.readonly
        zones = choice.zones_of(writable.union(readonly, bookies_of(metadata)))
        return MetadataRead(metadata, version, RegisteredBookies(writable, readonly, zones))

    async def _fill(self, fill: Fill) -> Event:
        ports, owner = self._ports, self._owner
        pace = GuardedCopyPace(owner.pace, self._ensure_not_deleted)
        copying = Copying(fill.metadata, ports.bookies, owner.nursery, pace, own=ports.choice.own)
        # Ask unregistered bookies last: a bookie that has another incarnation by now ends the connection.
        copying.reader.troubled.update(
            each for each in bookies_of(fill.metadata) if not ports.choice.is_registered(each)
        )
        without_space: set[BookieId] = set()

        def noticed(missing: list[Missing]) -> None:
            without_space.update(each.bookie for each in missing if each.bookie not in fill.takers)
            owner.progress(self._ledger, missing[0].entry, fill.last)

        watch = owner.store.watch(paths.ledger(self._ledger), self._changed)
        try:
            held = await copying.held(fill.newcomers)
            named = (fill.must | fill.may) - fill.newcomers
            held |= await copying.held_by_responsive(named)
            silent = fill.must.difference(held)
            await copying.fill(
                fill.wanted, fill.last, held, fill.takers, noticed, skip_unreadable=True, may_refuse=named
            )
            await self._read(copying, fill.read_at & fill.takers & held.keys(), fill.last)
        except NoSuchLedger:
            raise
        except LedgerError as error:
            return AttemptFailed(f"{type(error).__name__}: {error}", frozenset(copying.refused))
        finally:
            watch.close()
            self.copied += copying.copied
            self.copied_bytes += copying.copied_bytes
        self.unreadable = frozenset(copying.unreadable)
        refused = copying.refused.intersection(held) | silent
        return Filled(self.unreadable, not without_space & fill.must, frozenset(refused))

    def _ensure_not_deleted(self) -> None:
        if self._is_deleted:
            raise NoSuchLedger(f"ledger {self._ledger} was deleted while it was being copied")

    def _changed(self) -> None:
        """Check whether the ledger was deleted, because its metadata has changed. Copies of a deleted ledger are
        useless, and copying may take hours at a low rate."""
        self._owner.nursery.spawn(self._check_deleted(), name=f"check ledger {self._ledger}")

    async def _check_deleted(self) -> None:
        try:
            await self._ports.ledgers.read(self._ledger)
        except NoSuchLedger:
            self._is_deleted = True
        except MetadataError:
            return  # the end of the attempt will show it

    async def _read(self, copying: Copying, bookies: Collection[BookieId], last: EntryId) -> None:
        """Read every entry of the given bookies, and copy those that cannot be read again. Used for bookies that also
        list entries which they cannot read."""
        for bookie in sorted(bookies):
            async for fault in copying.faults(bookie, last):
                if not fault.is_certain:
                    log.info(
                        "bookie cannot be read ledger=%d bookie=%s entry=%d fault=%s",
                        self._ledger,
                        bookie,
                        fault.entry,
                        fault.what,
                    )
                    copying.refused.add(bookie)
                    break
                if fault.entry not in copying.unreadable and not copying.is_given_up(fault.entry):
                    await copying.copy_if_readable(fault.entry, bookie)

    async def _record(self, wanted: LedgerMetadata, version: int) -> Event:
        if not self._is_held():
            return LockLost()
        await self._ports.ledgers.write(wanted, version)
        log.info("recorded new ensemble ledger=%d bookies=%s", self._ledger, bookies_of(wanted))
        return MetadataWritten()

    # ── ledgers that are not closed ───────────────────────────────────────────────────────────────────────────────────

    async def _ask(self, metadata: LedgerMetadata, there: frozenset[BookieId]) -> Writer:
        owner = owner_of(metadata)
        is_led = owner is not None and await self._owner.is_led(owner) and await self._is_listed(owner)
        if is_led:
            return Writer(is_led, NO_ENTRY)
        last, lac = metadata.fragments[-1], NO_ENTRY
        digest = EntryDigest(metadata.digest, metadata.password)
        for bookie in sorted(there.intersection(last.ensemble)):
            try:
                lac = max(lac, await self._ports.bookies.read_lac(bookie, self._ledger, digest))
            except LedgerError:
                continue
        return Writer(is_led, lac, frozenset(await self._doubtful(there.intersection(last.ensemble))))

    # docs/protocol.md A11
    async def _is_listed(self, owner: PartitionId) -> bool:
        """Return True if the partition's log contains the ledger. A process that ended before it listed the ledger
        leaves it open, and no leader ever closes it."""
        listed, _ = await self._owner.lists.read(owner, latest=True)
        return listed.names(self._ledger)

    # docs/protocol.md A12
    async def _doubtful(self, bookies: Collection[BookieId]) -> list[BookieId]:
        """Return the bookies that were set up after the ledger was created. A bookie whose id proves that the ledger
        names this very incarnation is left out."""
        made = await self._owner.created_or_none(paths.ledger(self._ledger))
        found = []
        for bookie in sorted(each for each in bookies if not is_incarnation(each)):
            set_up = await self._owner.created_or_none(paths.cookie(bookie))
            if made is None or set_up is None or set_up > made:
                found.append(bookie)
        return found

    async def _recover(self) -> Event:
        if not self._is_held():
            return LockLost()
        await self._owner.recover(self._ledger)
        return Recovered()
