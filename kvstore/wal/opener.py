"""Takes over a ledger whose writer may still be alive. A Recovery makes the decisions about the end of the ledger, and
a LedgerWriter those about writing entries back.

The takeover has two steps, so that a partition's new leader can wait between them for the old leader's lease to expire.
`take_over` fences the ledger, finds its end and writes the tail back; `close` records the end. Each step may crash at
any point, and any node may repeat it (docs/protocol.md R1-R7).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import assert_never

from kvstore.env.ports import Nursery
from kvstore.errors import BookieError, LedgerError, LedgerFenced, NotRecoverable, StoreError, VersionConflict
from kvstore.meta.lost import given_up
from kvstore.proto.bookkeeper import RECOVERY_PRIORITY
from kvstore.proto.digest import EntryDigest, Packet, master_key
from kvstore.types import NO_ENTRY, BookieId, EntryId, LedgerId, LedgerMetadata, LedgerState
from kvstore.wal import recovery, writer
from kvstore.wal.creator import maker_of
from kvstore.wal.ensembles import in_recovery
from kvstore.wal.entry_reader import EntryReader
from kvstore.wal.handle import LedgerPorts
from kvstore.wal.placement import node_of_or_none
from kvstore.wal.read_ahead import ENTRIES_MAX, ReadAhead
from kvstore.wal.recovery import (
    READ_AHEAD,
    AskEntry,
    AskLast,
    EntryAnswer,
    LastAnswer,
    Phase,
    Recovery,
    TailEntry,
    Unknown,
)
from kvstore.wal.writer import (
    AddStored,
    Append,
    Confirm,
    EnsembleChanged,
    LedgerWriter,
    ReplaceBookies,
    SlowBookiesFailed,
    Spares,
    Store,
)

log = logging.getLogger(__name__)

TAKE_OVER_TIMEOUT_S = 15.0
AHEAD_BYTES = 256 << 10
"""Bytes requested from each bookie in one batch once recovery has to read many entries to find the ledger's end."""
STRAGGLERS_S = 0.2
"""Seconds to wait for the remaining bookies after an ack quorum has stored the written-back entries. Repair makes
copies that are still missing."""


class LedgerTakeover:
    """One attempt to recover one ledger. Call `take_over` first, then `close`."""

    def __init__(self, ledger: LedgerId, ports: LedgerPorts, nursery: Nursery, *, trusts_all: bool = False) -> None:
        """With `trusts_all`, the answer "no such entry" counts from every bookie. Otherwise it does not count from a
        bookie whose disk may have been emptied since it stored entries of the ledger (docs/protocol.md A12)."""
        self.ledger = ledger
        self._trusts_all = trusts_all
        self.fenced_at = 0.0
        """Boot-time clock in seconds at the answer that completed the fence. Entries that a former writer sends after
        this time are never confirmed."""
        self.last = NO_ENTRY
        """The ledger's last entry as `take_over` found it; after `close`, the last entry as recorded."""
        self._ports = ports
        self._nursery = nursery
        self._metadata: LedgerMetadata | None = None
        self._snapshot: LedgerMetadata | None = None
        self._length = 0
        self._last_packet: Packet | None = None

    @property
    def maker(self) -> bytes:
        """The identity of the process that has made the ledger; empty if it is not known. Call `take_over` first."""
        assert self._snapshot is not None, "take_over comes first"
        return maker_of(self._snapshot)

    async def take_over(self) -> None:
        """Fence the ledger, find its last entry, and write the tail back. A ledger that is already closed is not
        fenced. Raises NotRecoverable (also after TAKE_OVER_TIMEOUT_S), NoSuchLedger or MetadataError; the ledger then
        stays in recovery, and the caller may retry."""
        recorded, _ = await self._ports.ledgers.update(self.ledger, in_recovery)
        self._metadata = self._snapshot = recorded
        if recorded.state is LedgerState.CLOSED:
            self.fenced_at = self._ports.clock.now()
            self.last, self._length = recorded.last_entry, recorded.length
            return
        run = _Run(recorded, self._ports, self._nursery.child(f"recover {self.ledger}"), await self._doubtful(recorded))
        try:
            async with asyncio.timeout(TAKE_OVER_TIMEOUT_S):
                await run.finished()
        except TimeoutError:
            raise NotRecoverable(f"ledger {self.ledger}: recovery took longer than {TAKE_OVER_TIMEOUT_S} s") from None
        finally:
            await run.close()
        assert run.end is not None
        self.fenced_at, self._metadata, self.last = run.fenced_at, run.metadata, run.end
        self._last_packet = run.last_packet
        if self.last != NO_ENTRY:
            self._length = (await self._read_last()).length
        log.info("ledger recovered ledger=%d last_entry=%d written_back=%d", self.ledger, self.last, run.written_back)

    # docs/protocol.md A12
    async def _doubtful(self, recorded: LedgerMetadata) -> frozenset[BookieId]:
        """Return the bookies of the last ensemble whose answer "no such entry" proves nothing, because they were set up
        after the ledger. An id with an incarnation proves that the bookie has the disk that the ledger names."""
        asked = [each for each in recorded.fragments[-1].ensemble if node_of_or_none(each) is None]
        if self._trusts_all or not asked:
            return frozenset()
        return await self._ports.ledgers.younger_bookies(self.ledger, asked)

    # docs/protocol.md A14
    async def last_payload(self) -> bytes | None:
        """Return the payload of the last entry, or None if the entry is marked as lost. Raises NotRecoverable if it
        cannot be read now."""
        assert self._snapshot is not None, "take_over comes first"
        if given_up(self._snapshot)(self.last):
            return None
        return (await self._read_last()).payload

    async def _read_last(self) -> Packet:
        if self._last_packet is None:
            assert self._snapshot is not None
            assert self.last != NO_ENTRY
            reader = EntryReader(self._snapshot, self._ports.bookies, self._nursery, self._ports.choice.own)
            try:
                self._last_packet = await reader.read(self.last)
            except LedgerError as error:
                raise NotRecoverable(f"ledger {self.ledger}: its last entry cannot be read: {error}") from error
        return self._last_packet

    # docs/protocol.md R6, L9
    async def close(self) -> LedgerMetadata:
        """Record the end of the ledger, and return the recorded metadata. If another recovery has recorded an end
        first, that end counts, and `last` is set to it. Raises VersionConflict if the ledger was changed in another
        way, and MetadataError or NoSuchLedger."""
        assert self._metadata is not None, "take_over comes first"
        if self._metadata.state is LedgerState.CLOSED:
            return self._metadata  # a closed ledger never changes
        recorded, _ = await self._ports.ledgers.update(self.ledger, self._closed)
        if recorded.last_entry != self.last:
            log.info("another recovery closed the ledger ledger=%d last_entry=%d", self.ledger, recorded.last_entry)
        self._metadata, self.last, self._length = recorded, recorded.last_entry, recorded.length
        return recorded

    async def is_closed_elsewhere(self) -> bool:
        """Return True if another recovery has closed the ledger at a different last entry than `last`."""
        recorded, _ = await self._ports.ledgers.read_latest(self.ledger)
        return recorded.state is LedgerState.CLOSED and recorded.last_entry != self.last

    def _closed(self, recorded: LedgerMetadata) -> LedgerMetadata:
        if recorded.state is LedgerState.CLOSED:
            return recorded
        assert self._metadata is not None
        assert self._snapshot is not None
        if recorded.state is not LedgerState.IN_RECOVERY or recorded.fragments != self._snapshot.fragments:
            raise VersionConflict(f"ledger {self.ledger} was changed during its recovery")
        return self._metadata.closed(self.last, self._length)


class _Run:
    """One run of a ledger's takeover, from the fence until the last entry is written back."""

    def __init__(
        self, recorded: LedgerMetadata, ports: LedgerPorts, nursery: Nursery, doubtful: Collection[BookieId]
    ) -> None:
        """`doubtful` are the bookies whose answer "no such entry" proves nothing."""
        self.end: EntryId | None = None
        self.metadata = recorded
        """Includes the ensemble changes of the write-back, which stay in memory until the ledger is closed."""
        self.fenced_at = 0.0
        self.last_packet: Packet | None = None
        self.written_back = 0
        self._ports = ports
        self._nursery = nursery
        self._doubtful = doubtful
        self._key = master_key(recorded.password)
        self._digest = EntryDigest(recorded.digest, recorded.password)
        self._recovery = Recovery(recorded, partial(self._digest.open, recorded.ledger))
        self._ahead = {bookie: self._read_ahead(bookie) for bookie in recorded.fragments[-1].ensemble}
        self._writer: LedgerWriter | None = None
        self._events: deque[writer.Event] = deque()
        self._is_feeding = False
        self._adds_outstanding = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grace: asyncio.TimerHandle | None = None

    async def finished(self) -> None:
        """Run the takeover to its end. Raises NotRecoverable."""
        for command in self._recovery.start():
            self._perform_read(command)
        await self._done

    async def close(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        if not self._done.done():
            self._done.cancel()
        await self._nursery.close()

    # The fence and the reads.

    def _handle(self, event: recovery.Event) -> None:
        if self._done.done():
            return
        for command in self._recovery.handle(event):
            self._perform_read(command)
        if not self.fenced_at and self._recovery.phase is not Phase.FENCING:
            self.fenced_at = self._ports.clock.now()

    def _perform_read(self, command: recovery.Command) -> None:
        match command:
            case AskLast(bookies):
                for bookie in bookies:
                    self._nursery.spawn(self._ask(bookie, None), name=f"fence {bookie}")
            case AskEntry(entry, bookies):
                for bookie in bookies:
                    self._nursery.spawn(self._ask(bookie, entry), name=f"read {entry} at {bookie}")
            case TailEntry(packet):
                self._write_back(packet)
            case recovery.EndFound(last, _):
                self.end = last
                self._finish_if_written()
            case recovery.Undecided(reason):
                self._fail(NotRecoverable(reason))
            case _:
                assert_never(command)

    async def _ask(self, bookie: BookieId, entry: EntryId | None) -> None:
        if entry is not None and (packet := await self._ahead[bookie].take(entry)) is not None:
            self._handle(EntryAnswer(bookie, entry, packet))
            return
        wanted = NO_ENTRY if entry is None else entry
        try:
            answer = await self._ports.bookies.read(
                bookie, self.metadata.ledger, wanted, fence_key=self._key, priority=RECOVERY_PRIORITY
            )
        except BookieError as error:
            log.info("no definite answer from bookie ledger=%d bookie=%s error=%s", self.metadata.ledger, bookie, error)
            self._handle(Unknown(bookie, entry))
            return
        if entry is None:
            self._handle(LastAnswer(bookie, answer.packet))
        elif answer.packet is None and bookie in self._doubtful:
            what = "it was set up after the ledger, so that a missing entry there proves nothing"
            log.info("no definite answer from bookie ledger=%d bookie=%s error=%s", self.metadata.ledger, bookie, what)
            self._handle(Unknown(bookie, entry))
        else:
            self._handle(EntryAnswer(bookie, entry, answer.packet))

    # docs/protocol.md T12
    def _read_ahead(self, bookie: BookieId) -> ReadAhead[bytes]:
        """Return a read-ahead of the entries that the bookie returns in batches. The first entries are read one by
        one, because most recoveries end there, at entries that a bookie denies having. A batch cannot express such a
        denial."""

        def following(entry: EntryId) -> list[EntryId]:
            if self._recovery.found < READ_AHEAD:
                return [entry]
            named = self._recovery.metadata.write_set
            ids = map(EntryId, range(entry, entry + ENTRIES_MAX))
            return [each for each in ids if bookie in named(each)]

        async def fetch(entries: Sequence[EntryId]) -> dict[EntryId, bytes]:
            ledger, span = self.metadata.ledger, range(entries[0], entries[-1] + 1)
            try:
                packets = await self._ports.bookies.read_batch(
                    bookie,
                    ledger,
                    span,
                    bytes_max=AHEAD_BYTES,
                    fence_key=self._key,
                    priority=RECOVERY_PRIORITY,
                )
            except BookieError:
                return {}
            good = self._digest.open_those(ledger, packets, set(entries))
            return {entry: stored for entry, (_, stored) in good.items()}

        return ReadAhead(following, fetch)

    # The write-back.

    def _write_back(self, packet: Packet) -> None:
        if self._writer is None:
            before = packet.length - len(packet.payload)
            after, lac = EntryId(packet.entry - 1), self._recovery.lac
            pack = partial(self._digest.packet, self.metadata.ledger)
            self._writer = LedgerWriter(self.metadata, pack, after=after, length=before, frozen_lac=lac)
            self._feed(Spares(self._ports.choice.spares()))
        self.last_packet = packet
        self._feed(Append(packet.payload, self._ports.clock.now()))

    def _feed(self, event: writer.Event) -> None:
        assert self._writer is not None
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                for command in self._writer.handle(self._events.popleft()):
                    self._perform_write(command)
        finally:
            self._is_feeding = False
        self._finish_if_written()

    def _perform_write(self, command: writer.Command) -> None:
        match command:
            case Store(entry, packet, bookies):
                self._adds_outstanding += len(bookies)
                add_to_all = self._ports.bookies.add_to_all
                add_to_all(bookies, self.metadata.ledger, entry, packet, self._key, True, self._added)
            case Confirm():
                self.written_back += 1
            case ReplaceBookies():
                self._replace()
            case SlowBookiesFailed(bookies):
                for bookie in bookies:
                    self._ports.choice.failed(bookie)
            case writer.Halt(error):
                self._fail(error)
            case _:
                assert_never(command)

    def _added(self, entry: EntryId, bookie: BookieId, error: StoreError | None) -> None:
        self._adds_outstanding -= 1
        if self._done.done():
            return
        if error is None:
            self._feed(AddStored(entry, bookie))
        elif isinstance(error, LedgerFenced):  # docs/protocol.md B36
            self._fail(NotRecoverable(f"ledger {self.metadata.ledger} entry {entry}: {bookie} has another payload"))
        else:
            self._ports.choice.failed(bookie)
            # Queue the spares with the failure, because each feed ends with a check whether the write-back is finished.
            self._events.append(Spares(self._ports.choice.spares()))
            self._feed(writer.AddFailed(bookie))

    def _replace(self) -> None:
        """Change the ensemble in memory only. The compare-and-set that closes the ledger publishes the change, so that
        no other recovery sees an ensemble whose new bookies hold fewer entries."""
        assert self._writer is not None
        ensemble, write = self._writer.metadata.fragments[-1].ensemble, self._writer.metadata.quorum.write
        swapped = self._ports.choice.swaps(ensemble, self._writer.failed, write=write)
        if not swapped:
            self._feed(writer.ChangeFailed())
            return
        ensemble = tuple(swapped.get(bookie, bookie) for bookie in ensemble)
        self.metadata = self._writer.metadata.with_ensemble(self._writer.next_fragment, ensemble)
        self._feed(EnsembleChanged(self.metadata, frozenset(swapped)))

    def _finish_if_written(self) -> None:
        if self._done.done():
            return
        unsafe = self._writer.unconfirmed if self._writer is not None else 0
        if unsafe and not self._adds_outstanding and not self._is_feeding:
            self._fail(NotRecoverable(f"ledger {self.metadata.ledger}: too few bookies store its last entries"))
        elif self.end is None or unsafe:
            return
        elif not self._adds_outstanding:
            self._done.set_result(None)
        elif self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(STRAGGLERS_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: StoreError) -> None:
        if not self._done.done():
            self._done.set_exception(error)
