"""A partition's log on its leader: appends to the open ledger, and rolls to the next one.

A roll creates ledger n+1, lists it, holds appends back until every entry of n is acknowledged, continues in n+1, closes
n, and lists the exact first sequence of n+1. Only one roll runs at a time; it ends when n is CLOSED (docs/protocol.md
G5, G10, G13). While the metadata store is unreachable, the leader does not roll and keeps using the open ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from kvstore.env.events import wait_within
from kvstore.env.ports import Nursery
from kvstore.errors import (
    LedgerFenced,
    MetadataError,
    MetadataUnknown,
    NoSuchNode,
    NotEnoughBookies,
    OutcomeUnknown,
    StoreError,
    VersionConflict,
)
from kvstore.meta.layout import ClusterIdentity
from kvstore.meta.store import MetadataStore
from kvstore.types import NO_ENTRY, EntryId, LedgerId, LedgerMetadata, PartitionId, Position, Seq
from kvstore.wal.config import LogConfig
from kvstore.wal.copies.copier import Copier, Mark
from kvstore.wal.copies.pace import CopyPace
from kvstore.wal.creator import LedgerCreator
from kvstore.wal.handle import LedgerHandle, LedgerPorts
from kvstore.wal.leading.anchors import Anchors
from kvstore.wal.leading.owners import LedgerOwners
from kvstore.wal.leading.rolling import roll_reason
from kvstore.wal.leading.standstill import lose_stalled_log
from kvstore.wal.leading.trim import Trimmer
from kvstore.wal.ledger_list import NEVER, LedgerList
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from kvstore.wal.ports import AppendDone, ListedLedger
from kvstore.wal.takeover import TakenOver

log = logging.getLogger(__name__)

IN_FLIGHT_MAX = 1_000
"""Maximum number of entries that wait for their acknowledgement or for the end of a roll. Leaders stay far below it
(kvstore/partition/leading/entry_in_flight.py); a leader that exceeds it loses its log."""
CLOSE_RETRY_S = 0.5


class _HeldAppend(NamedTuple):
    payload: bytes
    first_seq: Seq
    done: AppendDone


class LeaderLog:
    """A partition's log, opened by the leader that may append to it. Steps 1 to 4 of the takeover are done."""

    def __init__(
        self,
        partition: PartitionId,
        opened: TakenOver,
        *,
        store: MetadataStore,
        identity: ClusterIdentity,
        ports: LedgerPorts,
        lists: LedgerLists,
        creator: LedgerCreator,
        config: LogConfig,
        lease_ms: int,
        mark: Mark,
        pace: CopyPace,
        owners: LedgerOwners,
        nursery: Nursery,
    ) -> None:
        """`opened` is the result of the takeover. `mark` and `pace` are used for copies (kvstore.wal.copies); `owners`
        is shared by the whole node. `nursery` belongs to this log, and is closed when the log is lost."""
        self.partition = partition
        self.listed = opened.listed
        self.version = opened.version
        self.waited = opened.waited
        """True if the leader waited for the former leader's lease to expire. False if a release record or a proven
        death made the wait unnecessary. No lease is left in either case."""
        self.lost: StoreError | None = None
        """The error that prevents further appends, or None. It is set before the entries in flight fail, whose outcome
        is unknown whatever the reason is."""
        self._opened = opened
        self._before_open = opened.recovered_end
        """Position of the last entry before the open ledger."""
        self._ports = ports
        self._lists = lists
        self._creator = creator
        self._config = config
        self._lease_ms = lease_ms
        self._nursery = nursery
        self._loop = asyncio.get_running_loop()
        self._held: deque[_HeldAppend] | None = None
        """Appends held back during a roll."""
        self._is_sealing = False
        self._first_append: tuple[Seq, float] | None = None
        """The first sequence in the open ledger, and the boot-time clock when it was appended."""
        self._on_lost: list[Callable[[StoreError], None]] = []
        self._wake = asyncio.Event()
        self._changing_list, self._rolling = asyncio.Lock(), asyncio.Lock()
        self._growth = self._next_growth()
        self._handle = self._open(opened.metadata)
        self.copier = Copier(ports, nursery, self._to_repair, mark=mark, pace=pace)
        pins = Pins(store, lists)
        self.trimmer = Trimmer(self, store=store, ledgers=ports.ledgers, pins=pins, clock=ports.clock, owners=owners)
        self.copier.start()
        nursery.spawn(self._roll_when_due(), name=f"{partition} log")
        standstill = lose_stalled_log(
            lambda: None if self.lost is not None else self._handle, ports.choice, config.check_every_s, self._lose
        )
        nursery.spawn(standstill, name=f"{partition} standstill")
        anchors = Anchors(self, store, identity, self._lose)
        self.report_applied = anchors.report_applied
        nursery.spawn(anchors.guard(), name=f"{partition} anchors")
        nursery.spawn(self._sweep_periodically(), name=f"{partition} sweep")

    @property
    def epoch(self) -> int:
        return self.listed.epoch

    @property
    def recovered_end(self) -> Position:
        """Position of the last entry before this leader's own ledger. Everything up to that position is closed and
        readable."""
        return self._opened.recovered_end

    @property
    def handle(self) -> LedgerHandle:
        """The handle of the open ledger."""
        return self._handle

    def append(self, payload: bytes, first_seq: Seq, done: AppendDone) -> None:
        """Send an entry to its write set. Several entries may be in flight, and appends during a roll are held back
        until it ends. The caller must keep far fewer than 1,000 entries in flight; beyond that the log is lost."""
        if self.lost is not None or self._is_sealing:
            reason = self.lost or "it is being closed"
            refusal = NotEnoughBookies(f"partition {self.partition}: its log is closed to this leader: {reason}")
            self._loop.call_soon(done, None, 0.0, refusal)
            return
        handle = self._handle
        writer, held = handle.writer, self._held
        waiting = len(held) if held is not None else writer.last_added - writer.last_confirmed
        if waiting >= IN_FLIGHT_MAX:
            self._lose(
                OutcomeUnknown(f"partition {self.partition}: expected at most {IN_FLIGHT_MAX} entries in flight")
            )
            self._loop.call_soon(done, None, 0.0, self.lost)
            return
        if held is not None:
            held.append(_HeldAppend(payload, first_seq, done))
            return
        if self._first_append is None:
            self._first_append = first_seq, self._ports.clock.now()
            self._wake.set()
        handle.append(payload, done)
        growth = self._growth
        if writer.length >= self._config.roll_bytes * growth or writer.last_added >= self._config.roll_entries * growth:
            self._wake.set()

    def close_for_good(self) -> None:
        """Stop appending. Entries in flight fail with OutcomeUnknown."""
        self._on_lost.clear()
        self._lose(OutcomeUnknown(f"partition {self.partition}: its leader has stopped"))

    async def seal(self) -> None:
        """Close the ledger once the last append is acknowledged. The log accepts no appends from then on, because an
        entry that is confirmed while the end is being recorded would be lost. Raises MetadataError or LedgerFenced."""
        async with self._rolling:
            await self._handle.drained()  # returns at once if the log is lost
            if self.lost is not None:
                raise self.lost
            self._is_sealing = True
            await self._handle.close()
        self.close_for_good()

    def on_lost(self, lost: Callable[[StoreError], None]) -> None:
        """Call `lost` once if this leader can no longer append: it was fenced, its ledger list was changed, or there
        were too few bookies for too long."""
        if self.lost is not None:
            self._loop.call_soon(lost, self.lost)
        else:
            self._on_lost.append(lost)

    async def trim(self, durable_seq: Seq, older_than_ms: int) -> int:
        """Delete closed ledgers whose entries are all at or below `durable_seq` and older than `older_than_ms`
        milliseconds, and return their number. Ledgers that a pin holds are kept. Raises MetadataError, or the error
        with which the log was lost."""
        if self.lost is not None:
            raise self.lost
        return await self.trimmer.trim(durable_seq, older_than_ms)

    async def drop_first(self, ends: list[EntryId]) -> None:
        """Remove the oldest ledgers from the list; see ListOwner in trim.py."""
        await self.change_list(lambda listed: listed.without_first(ends))

    async def change_list(self, change: Callable[[LedgerList], LedgerList]) -> None:
        """Apply `change` to the list and write it by compare-and-set. A conflict means that another leader has taken
        over, and loses the log. Raises MetadataError, or the error with which the log was lost."""
        async with self._changing_list:
            if self.lost is not None:
                raise self.lost
            await self._write_list(change(self.listed))

    async def _write_list(self, listed: LedgerList, created: LedgerMetadata | None = None) -> None:
        try:
            ledger = None if created is None else created.ledger
            self.version = await self._lists.write(
                self.partition, listed, self.version, created=ledger, should_stop=lambda: self.lost is not None
            )
        except (VersionConflict, NoSuchNode) as error:
            self._lose(LedgerFenced(f"partition {self.partition}: another leader changed its list"))
            raise LedgerFenced(str(error)) from error
        self.listed = listed
        self._growth = self._next_growth()

    def _next_growth(self) -> int:
        """Return the factor by which the next ledgers may exceed the usual size and age. If the list is too long, the
        leader keeps its current ledger instead of rolling."""
        return NEVER if self._lists.is_long(self.partition) else self.listed.growth

    def _open(self, metadata: LedgerMetadata) -> LedgerHandle:
        return LedgerHandle(
            metadata,
            self._ports,
            self._nursery,
            on_halt=self._lose,
            on_return=lambda _: self.copier.recheck_all(),
        )

    def _lose(self, error: StoreError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        level = (
            logging.WARNING if isinstance(error, NotEnoughBookies) else logging.INFO
        )  # others keep leading, or nobody can
        log.log(level, "lost the log partition=%s epoch=%d reason=%s", self.partition, self.epoch, error)
        self._handle.stop(error)
        self._handle.release()
        held, self._held = self._held, None
        for each in held or ():
            each.done(None, 0.0, NotEnoughBookies(f"partition {self.partition}: {error}"))
        listeners, self._on_lost = self._on_lost, []
        for listener in listeners:
            listener(error)
        self._wake.set()

    def known_ledgers(self) -> tuple[Sequence[ListedLedger], LedgerMetadata]:
        return self.listed.infos, self._handle.writer.metadata

    def statistics(self) -> dict[str, Any]:
        """Return counters and gauges for operators, by name."""
        lacking_at = Counter(bookie for bookies in self.copier.lacking.values() for bookie in bookies)
        return {
            "ledgers": len(self.listed.ledgers),
            "list_bytes": self._lists.size_of(self.partition),
            "ledgers_lacking_copies": len(self.copier.lacking),
            "ledgers_at_risk": len(self.copier.at_risk),
            "ledgers_lacking_at": sorted(lacking_at.items()),
            "ledgers_undecodable": len(self.trimmer.undecodable),
            "ledgers_sharing_zones": len(self.copier.sharing_zones),
            "copies_made": self.copier.copied,
            "open_ledger_bytes": self._handle.writer.length,
            "trimmed_seq": self.listed.trimmed_seq,
        }

    # Upkeep.

    async def _roll_when_due(self) -> None:
        """Roll the ledger whenever necessary, until the log is lost."""
        while self.lost is None:
            await wait_within(self._wake, self._config.check_every_s)
            self._wake.clear()
            try:
                await self._settle_first_seq()
                now = self._ports.clock.now()
                reason = roll_reason(
                    self._config,
                    self._handle.writer,
                    self._ports.choice,
                    growth=self._growth,
                    age_s=now - self._handle.created_at,
                    written_s=0.0 if self._first_append is None else now - self._first_append[1],
                )
                if reason and self.lost is None:
                    await self._roll(reason)
            except (MetadataError, NotEnoughBookies) as error:
                log.info("ledger not rolled partition=%s error=%r", self.partition, error)
                await asyncio.sleep(self._config.check_every_s)
            except StoreError as error:
                self._lose(error)
        await self._nursery.close()

    async def _sweep_periodically(self) -> None:
        """Sweep orphans at intervals of half of `orphan_age_s`. The first sweep comes at a random point of the
        interval. A log whose leader changes more often than that is therefore swept too, and logs whose leaders change
        together are swept at different times."""
        age_s = self._config.orphan_age_s
        wait_s = age_s / 2 * Random(self._handle.ledger).random()
        while self.lost is None:
            await asyncio.sleep(wait_s)
            wait_s = age_s / 2
            try:
                await self.trimmer.sweep(int(age_s * 1000))
            except MetadataError as error:
                log.info("orphans not swept partition=%s error=%r", self.partition, error)

    def _to_repair(self) -> list[tuple[LedgerId, EntryId | None]]:
        """Return the listed ledgers. The open ledger comes with its last confirmed entry, closed ledgers with None."""
        writer = self._handle.writer
        ids = [each.id for each in self.listed.ledgers]
        return [(each, writer.last_confirmed if each == self._handle.ledger else None) for each in ids]

    async def _settle_first_seq(self) -> None:
        """Record the exact first sequence of the open ledger, for which the list so far has only a lower bound. All
        earlier ledgers must be closed."""
        last = self.listed.ledgers[-1]
        if self._first_append is not None and not last.exact and self._held is None:
            first_seq = self._first_append[0]
            await self.change_list(lambda listed: listed.with_exact(last.id, first_seq))

    async def _roll(self, reason: str) -> None:
        """Continue in a new ledger. Raises MetadataError or NotEnoughBookies only if the new ledger was not listed;
        otherwise the roll is completed."""
        async with self._rolling:
            old = self._handle
            metadata = await self._list_next(old, reason)
            self._held = deque()
            await old.drained()
            if self.lost is not None:
                return
            self._switch(metadata)
            await self._close(old)
        self.copier.check_soon()

    async def _list_next(self, old: LedgerHandle, reason: str) -> LedgerMetadata:
        """Create the next ledger and list it. The list may be trimmed afterwards, while the former ledger is drained.
        On full disks, trimming frees the space that the last entries wait for."""
        async with self._changing_list:
            metadata = await self._creator.create(self.partition, after=old.ledger, failed=old.writer.failed)
            log.info(
                "rolling to a new ledger partition=%s from=%d to=%d reason=%s",
                self.partition,
                old.ledger,
                metadata.ledger,
                reason,
            )
            listed, bound = self.listed, self.listed.ledgers[-1].first_seq
            if self._first_append is not None:
                bound = self._first_append[0]
                listed = listed.with_exact(old.ledger, bound)  # nobody looks at it again
            listed = listed.with_ledger(
                metadata.ledger, bound, epoch=self.epoch, lease_ms=self._lease_ms, closed_end=self._before_open
            )
            try:
                await self._write_list(listed, metadata)
            except (MetadataUnknown, LedgerFenced):
                raise  # the ledger may be listed
            except StoreError:
                await self._creator.discard(metadata)
                raise
        return metadata

    def _switch(self, metadata: LedgerMetadata) -> None:
        """Send entries to the new ledger from now on. Every entry of the old ledger must be acknowledged."""
        old = self._handle
        if (last := old.writer.last_confirmed) != NO_ENTRY:
            self._before_open = Position(old.ledger, last)
        self._handle, self._first_append = self._open(metadata), None
        held, self._held = self._held, None
        for payload, first_seq, done in held or ():
            self.append(payload, first_seq, done)

    async def _close(self, old: LedgerHandle) -> None:
        """Close the old ledger, however long that takes, because no other roll can start before. If the log is lost in
        the meantime, the next leader closes the ledger."""
        try:
            while self.lost is None:
                try:
                    await old.close()
                    return
                except MetadataError as error:
                    log.info("ledger not closed yet ledger=%d error=%r", old.ledger, error)
                    await asyncio.sleep(CLOSE_RETRY_S)
            old.stop(self.lost)
        finally:
            old.release()  # also if it turns out to belong to another writer
