"""Adds of entries: decides which adds are admitted, stores them, and shows them to readers once they are on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore.bookie.admission import LedgerAdmission
from kvstore.bookie.backpressure import BackpressureGate
from kvstore.bookie.facts import Facts
from kvstore.bookie.fencing import WriteVerdict
from kvstore.bookie.index.index_files import IndexBusy
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.group import JournalGroup
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, RECORD_HEADER_SIZE, RECOVERY, RecordKind
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.keys import KeyChecks
from kvstore.bookie.ledger import UNKNOWN_TOP, Ledger
from kvstore.bookie.refusals import BookieRefusals
from kvstore.bookie.statistics import Statistics
from kvstore.bookie.stored_copies import Copy, StoredCopies
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import HEADER

log = logging.getLogger(__name__)

Done = Callable[[Status], Any]
LOCAL_FACTOR = 2
"""Factor by which the node's own client may exceed `pending_bytes_max`, at which other clients wait. Beyond it the
client's adds are refused."""


def _ignore_status(_status: Status) -> None:
    """Ignore the status of an add that no client waits for."""


class Adds:
    """Takes adds with a valid digest, judges them, and writes them to the journal."""

    def __init__(
        self,
        inventory: Inventory,
        journal: Journal,
        statistics: Statistics,
        *,
        held: StoredCopies,
        facts: Facts,
        keys: KeyChecks,
        admission: LedgerAdmission,
        refusals: BookieRefusals,
        sync_gate: BackpressureGate,
        pending_bytes_max: int,
    ) -> None:
        """`sync_gate` holds back clients on other nodes while more than `pending_bytes_max` bytes wait for a sync."""
        self._inventory = inventory
        self._ledgers = inventory.ledgers
        self._journal = journal
        self._statistics = statistics
        self.held = held
        self._facts = facts
        self._keys = keys
        self._admission = admission
        self._refusals = refusals
        self._sync_gate = sync_gate
        self._pending_bytes_max = pending_bytes_max
        self.pending_bytes = 0
        """Bytes of packets that are written but not synced yet."""
        self.refusable: Callable[[Done], Done] = lambda done: done
        """Returns a callback to use instead of that of an add whose packet another add has written. A bookie with
        several directories sets it, to refuse such adds if the directory fails (docs/protocol.md, B24)."""

    def take(self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done) -> None:
        """Store a packet if the add is admitted. `done` gets OK once the packet is on disk, otherwise the reason of the
        refusal. The add may have to wait for the ledger's metadata. `lac` is the last-add-confirmed in the packet's
        header."""
        found = self._ledgers.get(ledger)
        if found is None or found.key != key or found.is_fenced or not found.is_admitted:
            found = self._judged(ledger, entry, body, key, recovery, lac, done)  # otherwise judge_add returns ADMIT
            if found is None:
                return
        self._store(found, entry, body, recovery, lac, done)

    def _judged(
        self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done
    ) -> Ledger | None:
        """Return the ledger if the add is admitted at once. Otherwise return None: the add was refused, or waits for
        the ledger's metadata."""
        verdict, use = self._keys.judge_add(ledger, key, recovery), Use.COPY if recovery else Use.ADD
        if verdict is WriteVerdict.ADMIT:
            return self._first_contact(ledger, key, done, use=use, size=len(body))
        if verdict is not WriteVerdict.ASK:
            done(self._refusals.by(verdict))
            return None

        def resume(of_key: WriteVerdict, of_add: WriteVerdict) -> None:
            again = self._keys.judge_add(ledger, key, recovery)  # it may have been fenced meanwhile
            if again is WriteVerdict.ASK:
                again = of_key if recovery else of_add
            if again is not WriteVerdict.ADMIT:
                done(self._refusals.by(again))
                return
            flags = 0 if recovery else ADMITTED
            found = self._first_contact(ledger, key, done, flags=flags, use=use, size=len(body))
            if found is not None:
                self._store(found, entry, body, recovery, lac, done)

        if not self._admission.ask(ledger, key, len(body), resume):
            done(self._refusals.overload())
        return None

    def _first_contact(
        self, ledger: int, key: bytes, done: Done, *, flags: int = 0, use: Use, size: int
    ) -> Ledger | None:
        """Return the ledger after recording its key. If the journal has no space for that, refuse the add and return
        None."""
        try:
            return self._facts.first_contact(ledger, key, flags=flags, use=use, size=size)
        except JournalFull:
            done(self._refusals.no_space())
            return None

    def _store(self, ledger: Ledger, entry: int, body: bytes, recovery: bool, lac: int, done: Done) -> None:
        journal = self._journal
        if not recovery and (journal.is_full or self.pending_bytes > LOCAL_FACTOR * self._pending_bytes_max):
            done(self._refusals.no_space())
            return
        if entry <= ledger.top and not self._may_store(ledger, entry, body, recovery, lac, done):
            return
        if recovery and not journal.has_capacity(Use.COPY, RECORD_HEADER_SIZE + len(body)):
            done(self._refusals.no_space())
            return
        try:
            offset = journal.append(RecordKind.ADD, RECOVERY if recovery else 0, ledger.id, entry, body)
        except JournalFull:
            done(self._refusals.no_space())
            return
        self._appended(ledger, entry, offset, body, lac, done)

    # docs/protocol.md B36
    def _may_store(self, ledger: Ledger, entry: int, body: bytes, recovery: bool, lac: int, done: Done) -> bool:
        """Return True if the add may be stored, because the ledger has no copy of the entry or its copy may be
        replaced. Otherwise answer the add, at once or when the ledger's index has been rebuilt, and return False."""
        try:
            copy = self._compare(ledger, entry, body)
        except IndexBusy as busy:
            again = partial(self._take_again, ledger, entry, body, recovery, lac, self.refusable(done))
            self._inventory.index_files.after_rebuild(busy.file, again)
            return False
        except OSError:  # the copy may be intact, so nothing replaces it
            done(self._refusals.unreadable())
            return False
        match copy:
            case Copy.NONE | Copy.SAME:
                return True
            case Copy.IDENTICAL:  # a repetition whose answer was lost
                done(Status.OK)
            case Copy.IDENTICAL_SOON:
                self._journal.after(ledger.last_group, partial(self.refusable(done), Status.OK))
            case Copy.OTHER:
                done(self._refusals.other_entry(ledger.id, entry))
            case Copy.DAMAGED if recovery:
                return True
            case Copy.DAMAGED:
                done(self._refusals.unreadable())
        return False

    def _take_again(self, ledger: Ledger, entry: int, body: bytes, recovery: bool, lac: int, done: Done) -> None:
        """Take an add that has waited for the ledger's index. It waits once, because the disk may keep failing."""
        try:
            self._compare(ledger, entry, body)
        except OSError:
            done(self._refusals.unreadable())
        else:
            self.take(ledger.id, entry, body, ledger.key, recovery, lac, done)

    def _compare(self, ledger: Ledger, entry: int, body: bytes) -> Copy:
        if ledger.top == UNKNOWN_TOP:
            ledger.top = ledger.index.last
        return Copy.NONE if entry > ledger.top else self.held.compare(ledger, entry, body)

    def _appended(self, ledger: Ledger, entry: int, offset: int, body: bytes, lac: int, done: Done) -> None:
        """Record that a packet was written to the journal's open group."""
        group = self._journal.open_group
        group.adds.append((ledger, entry, offset, body, lac, done))
        ledger.last_group = group.number
        if entry > ledger.top:
            ledger.top = entry
        self.pending_bytes += len(body)
        if self.pending_bytes > self._pending_bytes_max:
            self._shut_gate()

    def store_copy(self, ledger: Ledger, entry: int, body: bytes) -> None:
        """Write the ledger's copy of an entry to the journal again, unless a newer copy waits for a sync. Raises
        JournalFull."""
        if self.held.waiting(ledger, entry) is None:
            self._write(ledger, entry, body)

    # docs/protocol.md B36
    def store_again(self, ledger: Ledger, entry: int, body: bytes) -> None:
        """Write a record of the previous journal again. A readable copy with another payload was stored first, and is
        kept instead. Raises JournalFull or OSError."""
        if self._compare(ledger, entry, body) is Copy.OTHER:
            self._refusals.other_entry(ledger.id, entry)
        else:
            self._write(ledger, entry, body)

    def _write(self, ledger: Ledger, entry: int, body: bytes) -> None:
        offset = self._journal.append(RecordKind.ADD, RECOVERY, ledger.id, entry, body, use=Use.REWRITE)
        self._appended(ledger, entry, offset, body, HEADER.unpack_from(body)[2], _ignore_status)

    # docs/protocol.md B12
    def _shut_gate(self) -> None:
        if not self._journal.is_full:  # otherwise adds are refused at once
            self._sync_gate.shut(self)

    def synced(self, group: JournalGroup) -> None:
        """Handle a group that is now on disk. Make its entries visible, answer the senders, then notify readers that
        wait for the LAC. Those readers come last because they do more work."""
        segment, stored, size_sum = group.segment, self._inventory.stored, 0
        self.held.shown = group
        raised: dict[Ledger, int] = {}
        for ledger, entry, offset, body, lac, _ in group.adds:
            size = len(body)
            stored(segment, ledger, entry, offset, size)
            size_sum += size
            for each in ledger.listeners:
                each.entry_stored(entry, body)
            if lac > raised.get(ledger, ledger.lac):
                raised[ledger] = lac
        self.held.shown = None
        self.pending_bytes -= size_sum
        self._statistics.adds += len(group.adds)
        self._statistics.add_bytes += size_sum
        for add in group.adds:
            try:
                add[5](Status.OK)
            except Exception:  # an error of one client must not keep the others from their answers
                log.exception("callback of an add failed ledger=%d entry=%d", add[0].id, add[1])
        for ledger, lac in raised.items():
            ledger.raise_lac(lac)
        if self._sync_gate.is_shut and self.pending_bytes <= self._pending_bytes_max:
            self._sync_gate.open(self)
