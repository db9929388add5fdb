"""Adds of entries: who is admitted, what is stored, and what is shown once it is on the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvstore.bookie.admission import Admission
from kvstore.bookie.backpressure import Door
from kvstore.bookie.facts import Facts
from kvstore.bookie.fencing import Verdict
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.group import Group
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, RECORD_HEADER_SIZE, RECOVERY, Kind
from kvstore.bookie.journal.room import JournalFull, Use
from kvstore.bookie.keys import Keys
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.reader import Reader
from kvstore.bookie.refusals import Refusals
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import Status
from kvstore.proto.digest import HEADER

log = logging.getLogger(__name__)

Done = Callable[[Status], Any]
LOCAL_FACTOR = 2
"""How far the node's own client may go beyond what makes others wait, before its adds are refused."""


def _nobody(_status: Status) -> None:
    """Nobody waits for this add."""


class Adds:
    """Adds whose digest is right, on their way to the disk."""

    def __init__(
        self,
        inventory: Inventory,
        journal: Journal,
        statistics: Statistics,
        *,
        reader: Reader,
        facts: Facts,
        keys: Keys,
        admission: Admission,
        refusals: Refusals,
        door: Door,
        pending_bytes_max: int,
    ) -> None:
        """`door`: where clients elsewhere wait while more than `pending_bytes_max` bytes wait for a sync."""
        self._inventory = inventory
        self._ledgers = inventory.ledgers
        self._journal = journal
        self._statistics = statistics
        self._reader = reader
        self._facts = facts
        self._keys = keys
        self._admission = admission
        self._refusals = refusals
        self._door = door
        self._pending_bytes_max = pending_bytes_max
        self.pending_bytes = 0
        """Of packets that wait for a sync."""

    def take(self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done) -> None:
        """Store a packet if it is admitted, and call `done` with OK when it is on the disk; else with the refusal."""
        found = self._ledgers.get(ledger)
        if found is None or found.key != key or found.is_fenced or not found.is_admitted:
            found = self._judged(ledger, entry, body, key, recovery, lac, done)  # otherwise judge_add says ADMIT
            if found is None:
                return
        self._store(found, entry, body, recovery, lac, done)

    def _judged(
        self, ledger: int, entry: int, body: bytes, key: bytes, recovery: bool, lac: int, done: Done
    ) -> Ledger | None:
        """The ledger if the add is admitted at once; otherwise it is refused, or waits for the metadata."""
        verdict, use = self._keys.judge_add(ledger, key, recovery), Use.COPY if recovery else Use.ADD
        if verdict is Verdict.ADMIT:
            return self._first_contact(ledger, key, done, use=use, size=len(body))
        if verdict is not Verdict.ASK:
            done(self._refusals.by(verdict))
            return None

        def resume(of_key: Verdict, of_add: Verdict) -> None:
            again = self._keys.judge_add(ledger, key, recovery)  # it may have been fenced meanwhile
            if again is Verdict.ASK:
                again = of_key if recovery else of_add
            if again is not Verdict.ADMIT:
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
        """The ledger with its key in the books; None, and the add is refused, if there is no room."""
        try:
            return self._facts.first_contact(ledger, key, flags=flags, use=use, size=size)
        except JournalFull:
            done(self._refusals.no_room())
            return None

    def _store(self, ledger: Ledger, entry: int, body: bytes, recovery: bool, lac: int, done: Done) -> None:
        journal = self._journal
        if not recovery and (journal.is_full or self.pending_bytes > LOCAL_FACTOR * self._pending_bytes_max):
            done(self._refusals.no_room())
            return
        index = ledger.index
        may_have = entry <= index.sealed_last or entry - index.first < len(index.places) or index.others
        if may_have and self._has(ledger, entry, body):
            done(Status.OK)  # a repetition whose answer was lost
            return
        if recovery and not journal.has_room(Use.COPY, RECORD_HEADER_SIZE + len(body)):
            done(self._refusals.no_room())
            return
        try:
            offset = journal.append(Kind.ADD, RECOVERY if recovery else 0, ledger.id, entry, body)
        except JournalFull:
            done(self._refusals.no_room())
            return
        group = journal.open_group
        group.adds.append((ledger, entry, offset, body, lac, done))
        ledger.last_group = group.number
        self.pending_bytes += len(body)
        if self.pending_bytes > self._pending_bytes_max:
            self._shut_door()

    def store_copy(self, ledger: Ledger, entry: int, body: bytes) -> None:
        """Store a packet that is here once more. Raises JournalFull."""
        offset = self._journal.append(Kind.ADD, RECOVERY, ledger.id, entry, body, use=Use.REWRITE)
        group = self._journal.open_group
        lac = HEADER.unpack_from(body)[2]
        group.adds.append((ledger, entry, offset, body, lac, _nobody))
        ledger.last_group = group.number
        self.pending_bytes += len(body)
        if self.pending_bytes > self._pending_bytes_max:
            self._shut_door()

    # docs/protocol.md B12
    def _shut_door(self) -> None:
        if not self._journal.is_full:  # else adds are refused at once
            self._door.shut(self)

    def _has(self, ledger: Ledger, entry: int, body: bytes) -> bool:
        place, size = self._reader.place(ledger, entry)
        return bool(place) and size == len(body) and self._reader.body(ledger.id, entry, place, size) == body

    def synced(self, group: Group) -> None:
        """A group is on the disk: show all its entries, tell those who sent them, then those who follow the ledgers,
        who have more to do with it than to answer."""
        segment, stored, size_sum = group.segment, self._inventory.stored, 0
        raised: dict[Ledger, int] = {}
        for ledger, entry, offset, body, lac, _ in group.adds:
            size = len(body)
            stored(segment, ledger, entry, offset, size)
            size_sum += size
            for each in ledger.listeners:
                each.entry_stored(entry, body)
            if lac > raised.get(ledger, ledger.lac):
                raised[ledger] = lac
        self.pending_bytes -= size_sum
        self._statistics.adds += len(group.adds)
        self._statistics.add_bytes += size_sum
        for add in group.adds:
            try:
                add[5](Status.OK)
            except Exception:  # a fault of one client's must not keep the others from their answers
                log.exception("ledger=%d entry=%d whoever sent it failed", add[0].id, add[1])
        for ledger, lac in raised.items():
            ledger.raise_lac(lac)
        if self._door.is_shut and self.pending_bytes <= self._pending_bytes_max:
            self._door.open(self)
