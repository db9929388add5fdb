"""Appends entries to one ledger. A LedgerWriter makes all decisions; this module performs its commands."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from kvstore.env.ports import Clock, Nursery
from kvstore.env.traces import Traces
from kvstore.errors import (
    BookieError,
    LedgerClosed,
    LedgerFenced,
    MetadataError,
    MetadataUnavailable,
    NoSuchLedger,
    OutcomeUnknown,
    StoreError,
)
from kvstore.meta.ledgers import LedgerStore
from kvstore.proto.digest import EntryDigest, master_key
from kvstore.types import BookieId, EntryId, LedgerMetadata, Position
from kvstore.wal.choice import BookieChoice
from kvstore.wal.coverage import is_somewhere_short
from kvstore.wal.ensembles import closed_by_writer, with_swaps
from kvstore.wal.ports import AppendDone, BookieClient
from kvstore.wal.writer import (
    AddFailed,
    AddStored,
    Append,
    ChangeFailed,
    Command,
    Confirm,
    EnsembleChanged,
    Event,
    Fenced,
    Halt,
    LedgerWriter,
    ReplaceBookies,
    Returned,
    SlowBookiesFailed,
    Spares,
    StopWriting,
    Store,
    WriterState,
)

log = logging.getLogger(__name__)

LAC_IDLE_S, LAC_BUSY_S, BUSY_S = 0.005, 0.01, 0.02
"""Seconds after the last confirmation until an explicit LAC makes the last entry visible to readers, if no entry
follows. LAC_BUSY_S applies if the last append came less than BUSY_S seconds after the one before it: the next entry is
then likely to come soon, and carries the LAC at no extra cost."""
MERGE_S = 0.002
"""Delay in seconds before an ensemble change, so that bookies which fail at about the same time are replaced in one
change."""
UNKNOWN_RETRY_S = 0.5
PROBE_MIN_S = 0.1
PROBE_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class LedgerPorts:
    """The dependencies that all ledger handles of this node share."""

    clock: Clock
    bookies: BookieClient
    ledgers: LedgerStore
    choice: BookieChoice
    traces: Traces = Traces()  # noqa: RUF009 - it takes none


class LedgerHandle:
    """The write handle of an open ledger that this process created. No other handle writes to the ledger."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        ports: LedgerPorts,
        nursery: Nursery,
        *,
        on_halt: Callable[[StoreError], None],
        on_return: Callable[[BookieId], None] = lambda _: None,
    ) -> None:
        """Start writing. `on_halt` is called once if the ledger is lost to another writer or cannot be written any
        longer. `on_return` is called when a failed bookie accepts adds again; the ledger may lack copies there."""
        self.ledger = metadata.ledger
        self._ports = ports
        self._nursery = nursery
        self._on_halt = on_halt
        self._on_return = on_return
        self._loop = asyncio.get_running_loop()
        self._key = master_key(metadata.password)
        self._digest = EntryDigest(metadata.digest, metadata.password)
        self.writer = LedgerWriter(metadata, partial(self._digest.packet, metadata.ledger))
        self._add_to_all = ports.bookies.add_to_all
        self._now = ports.clock.now
        self._traces = ports.traces
        self._waiting: deque[AppendDone] = deque()
        self._events: deque[Event] = deque()
        self._is_feeding = False
        self._lac_timer: asyncio.TimerHandle | None = None
        self._appended_at = -BUSY_S
        self._lac_idle_s = LAC_IDLE_S
        self._probing: set[BookieId] = set()
        self._silent: set[BookieId] = set()
        """Bookies that count as failed while adds are outstanding at them. An answer to another request proves nothing
        about the bookie's disk; an answer to one of these adds does."""
        self.created_at = self.progress_at = self._now()
        """Boot-time clock in seconds when an entry was last confirmed, or when an entry was first sent after a
        pause."""
        self._is_closing = False
        self._drained: asyncio.Future[None] | None = None
        self._is_changing = False
        """True while an ensemble change is in progress."""
        self._settled = asyncio.Event()
        """Set while no ensemble change is in progress."""
        self._settled.set()
        ports.choice.listen(self, self.update_spares)
        self.update_spares()

    @property
    def is_halted(self) -> bool:
        """True once the ledger accepts no more entries."""
        return self.writer.state is WriterState.HALTED

    def append(self, payload: bytes, done: AppendDone) -> None:
        """Send an entry to its write set. `done` is called once, in the order of the appends, with the entry's position
        or an error. If the ledger halts first, the error is OutcomeUnknown. Must not be called once the handle is
        halted."""
        now = self._now()
        if not self._waiting:
            self.progress_at = now
        self._waiting.append(done)
        self._lac_idle_s = LAC_BUSY_S if now - self._appended_at < BUSY_S else LAC_IDLE_S
        self._appended_at = now
        if self._is_feeding:
            self._events.append(Append(payload, now))
        else:
            self._perform_all(self.writer.append(payload, now))

    async def drained(self) -> None:
        """Wait until no entry is in flight or the handle is halted."""
        while self._waiting and not self.is_halted:
            self._drained = self._loop.create_future()
            await self._drained

    def stop(self, error: StoreError) -> None:
        """Stop writing because of `error`. Entries in flight fail with OutcomeUnknown."""
        self._feed(StopWriting(error))

    def update_spares(self) -> None:
        """Tell the writer which bookies can replace a failed one. BookieChoice calls this when that set may have
        changed."""
        if not self.is_halted and not self._is_closing:
            self._feed(Spares(self._ports.choice.spares(is_urgent=self._is_urgent())))

    def _is_urgent(self) -> bool:
        """Return True if so many bookies have failed that some of the next entries cannot be confirmed. They would
        block all entries after them."""
        metadata, failed = self.writer.metadata, self.writer.failed
        lost = {place for place, bookie in enumerate(metadata.fragments[-1].ensemble) if bookie in failed}
        return is_somewhere_short(lost, metadata.quorum)

    async def close(self) -> None:
        """Record the last confirmed entry as the end of the ledger. Every entry must be confirmed before the call.
        Raises LedgerFenced, LedgerClosed or NoSuchLedger if the ledger no longer belongs to this writer, and
        MetadataError if the metadata store is unreachable; the caller may then retry."""
        writer = self.writer
        assert not writer.unconfirmed, "a ledger is closed at its last confirmed entry"
        self._is_closing = True
        await self._settled.wait()
        last, length, mine = writer.last_confirmed, writer.confirmed_length, writer.metadata
        await self._ports.ledgers.update(
            self.ledger, lambda recorded: closed_by_writer(recorded, mine, last_entry=last, length=length)
        )
        self.release()

    def release(self) -> None:
        """Cancel timers and stop listening for spare bookies. Bookies may still answer outstanding adds afterwards."""
        self._ports.choice.forget(self)
        if self._lac_timer is not None:
            self._lac_timer.cancel()
            self._lac_timer = None

    def _feed(self, event: Event) -> None:
        """Pass an event to the writer and perform its commands. An event that arrives while commands are being
        performed is queued."""
        if self._is_feeding:
            self._events.append(event)
        else:
            self._perform_all(self.writer.handle(event))

    def _perform_all(self, commands: list[Command]) -> None:
        """Perform the commands, then the commands of events that arrived in the meantime."""
        self._is_feeding = True
        try:
            for command in commands:
                self._perform(command)
            while self._events:
                for command in self.writer.handle(self._events.popleft()):
                    self._perform(command)
        finally:
            self._is_feeding = False
        if self._is_changing and self.writer.state is not WriterState.CHANGING:
            self._is_changing = False
            self._settled.set()

    def _perform(self, command: Command) -> None:
        match command:
            case Store(entry, packet, bookies):
                self._add_to_all(bookies, self.ledger, entry, packet, self._key, False, self._added)
            case Confirm(entry, sent_at):
                self._confirm(entry, sent_at)
            case ReplaceBookies():
                self._is_changing = True
                self._settled.clear()
                self._nursery.spawn(self._replace(), name=f"ledger {self.ledger} replace bookies")
            case SlowBookiesFailed(bookies):
                for bookie in bookies:
                    self._silent.add(bookie)
                    self._quarantine(bookie, "too many adds are outstanding")
            case Halt(error):
                self._halt(error)
            case _:
                assert_never(command)

    def _added(self, entry: EntryId, bookie: BookieId, error: StoreError | None) -> None:
        if self._silent:
            self._silent.discard(bookie)
        if error is None:
            if self._traces.live:
                self._traces.stored(self.ledger, entry, bookie)
            if self._is_feeding:
                self._events.append(AddStored(entry, bookie))
            elif commands := self.writer.stored(entry, bookie):
                self._perform_all(commands)
        elif self._is_closing:
            return  # nothing waits for it; repair makes the missing copy
        elif isinstance(error, LedgerFenced):
            self._feed(Fenced())
        else:
            self._bookie_failed(bookie, error)

    def _confirm(self, entry: EntryId, sent_at: float) -> None:
        done = self._waiting.popleft()
        if not self._waiting and (self._lac_timer is None or self._drained is not None):
            self._idle()
        self.progress_at = self._now()
        self._notify(done, Position(self.ledger, entry), sent_at, None)

    def _idle(self) -> None:
        if self._lac_timer is None:
            self._lac_timer = self._loop.call_later(self._lac_idle_s, self._send_lac, self.writer.last_added)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # docs/protocol.md W7
    def _send_lac(self, last_added: EntryId) -> None:
        """Send an explicit LAC if nothing was appended since the timer was set. Without it readers see only the entry
        before the last one, which is the LAC in the last packet."""
        self._lac_timer = None
        writer = self.writer
        if self.is_halted or writer.unconfirmed:
            return  # the next confirmation sets the timer again
        if writer.last_added != last_added:
            left = max(0.0, self._appended_at + self._lac_idle_s - self._now())
            self._lac_timer = self._loop.call_later(left, self._send_lac, writer.last_added)
            return
        lac = writer.last_confirmed
        body = self._digest.lac_packet(self.ledger, lac)
        failed = writer.failed
        for bookie in writer.metadata.fragments[-1].ensemble:
            if bookie not in failed:
                self._ports.bookies.write_lac(bookie, self.ledger, self._key, body, lac)

    def _halt(self, error: StoreError) -> None:
        self.release()
        log.info("ledger halted ledger=%d entries_in_flight=%d reason=%s", self.ledger, len(self._waiting), error)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        waiting, self._waiting = self._waiting, deque()
        for done in waiting:
            self._notify(done, None, 0.0, OutcomeUnknown(str(error)))
        self._on_halt(error)

    def _notify(self, done: AppendDone, position: Position | None, sent_at: float, error: StoreError | None) -> None:
        """Call `done`, and pass an exception that it raises to the event loop. Otherwise the exception would skip the
        remaining confirmations, and every later entry would be matched with the wrong callback."""
        try:
            done(position, sent_at, error)
        except Exception as failure:  # noqa: BLE001
            what = f"callback of an entry of ledger {self.ledger} failed"
            self._loop.call_exception_handler({"message": what, "exception": failure})

    # Bookies that fail, are replaced, or come back.

    def _bookie_failed(self, bookie: BookieId, error: StoreError) -> None:
        if self.is_halted or bookie in self.writer.failed:
            return
        self._feed(AddFailed(bookie))
        self._quarantine(bookie, error)

    # docs/protocol.md W2
    def fail_silent(self, bookie: BookieId, reason: str) -> None:
        """Treat a bookie that answers no adds as failed. Does nothing while the ledger is being closed, because an
        ensemble change would race with the write that records the end."""
        if self._is_closing:
            return
        self._silent.add(bookie)
        self._bookie_failed(bookie, BookieError(f"{bookie}: {reason}"))

    def _quarantine(self, bookie: BookieId, why: object) -> None:
        """Quarantine a failed bookie, look for a replacement, and start probing for its return."""
        log.info("bookie failed ledger=%d bookie=%s reason=%s", self.ledger, bookie, why)
        self._ports.choice.failed(bookie)
        self.update_spares()
        if bookie not in self._probing:
            self._probing.add(bookie)
            self._nursery.spawn(self._probe(bookie), name=f"ledger {self.ledger} probe {bookie}")

    async def _replace(self) -> None:
        await asyncio.sleep(MERGE_S)
        writer = self.writer
        first, mine = writer.next_fragment, writer.metadata
        ensemble = mine.fragments[-1].ensemble
        swapped = self._ports.choice.swaps(
            ensemble, writer.failed, write=mine.quorum.write, is_urgent=self._is_urgent()
        )
        if not swapped:
            self._feed(ChangeFailed())
            return
        is_unknown = False
        while not self.is_halted:
            try:
                metadata, _ = await self._ports.ledgers.update(
                    self.ledger, lambda recorded: with_swaps(recorded, mine, first, swapped)
                )
            except (LedgerFenced, LedgerClosed, NoSuchLedger) as error:
                self._feed(StopWriting(error))
                return
            except MetadataUnavailable:
                if not is_unknown:
                    self._feed(ChangeFailed())
                    return
            except MetadataError:
                is_unknown = True  # must be known before anything is confirmed
            else:
                log.info("bookies replaced ledger=%d entry=%d replaced=%s", self.ledger, first, swapped)
                self._feed(EnsembleChanged(metadata, frozenset(swapped)))
                return
            await asyncio.sleep(UNKNOWN_RETRY_S)

    async def _probe(self, bookie: BookieId) -> None:
        """Probe a failed bookie with exponential backoff until it is back for good or no longer in the ensemble."""
        delay_s = PROBE_MIN_S
        while not (self.is_halted or self._is_closing):
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, PROBE_MAX_S)
            if bookie not in self.writer.metadata.fragments[-1].ensemble:
                break
            if bookie not in self.writer.failed:
                if delay_s >= PROBE_MAX_S:
                    break  # back for good
                continue
            if bookie in self._silent:
                delay_s = PROBE_MIN_S
                continue
            if not self._ports.choice.is_readonly(bookie) and await self._answers(bookie):
                self._feed(Returned(bookie))
                if bookie not in self.writer.failed:
                    self._on_return(bookie)
        self._probing.discard(bookie)
        self._silent.discard(bookie)

    async def _answers(self, bookie: BookieId) -> bool:
        try:
            await self._ports.bookies.read_lac(bookie, self.ledger, self._digest)
        except BookieError:
            return False
        return True
