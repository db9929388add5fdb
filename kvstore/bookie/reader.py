"""The read side of a bookie's storage: entries, last-add-confirmed and long polls. Shows only entries that are on
disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.bookie.index.entry_index import NOWHERE, OFFSET_BITS, OFFSET_MASK
from kvstore.bookie.index.index_files import IndexBusy
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.ledger import Ledger, LedgerListener
from kvstore.bookie.rate_limited_log import RateLimitedLog
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import LAST_ENTRY, Status

log = logging.getLogger(__name__)

ReadDone = Callable[[Status, int, bytes | None, int], Any]
"""Called with the status, the entry id, the packet or None, and the highest LAC known here (-1 if none)."""
WAITS_MAX = 8
"""Maximum number of index files for whose rebuild one request waits."""
TURN_S = 0.01
"""Maximum number of seconds that one batch may spend in an event-loop turn. Without the limit, a disk that seeks for
each entry would delay adds and the leases of the node's leaders."""


def _nothing() -> None:
    """Do nothing; returned if no request is left to cancel."""


PLACE_UNKNOWN = (-1, -1)
"""Place and size of an entry whose index cannot be read now."""


# docs/protocol.md B2
class Reader:
    """Answers reads from the inventory. A read waits for the journal's next sync if the entry may be in progress."""

    def __init__(self, inventory: Inventory, journal: Journal, statistics: Statistics, *, poll_ms_max: int) -> None:
        self._inventory = inventory
        self._ledgers = inventory.ledgers
        self._journal = journal
        self._statistics = statistics
        self._poll_ms_max = poll_ms_max
        self._log = RateLimitedLog(log)
        self._loop = asyncio.get_running_loop()

    def read(self, ledger: int, entry: int, done: ReadDone, *, after_all: bool) -> None:
        """Read one entry; LAST_ENTRY reads the last one stored. With `after_all`, the answer waits until everything
        accepted for the ledger before this call is on disk."""
        found = self._ledgers.get(ledger)
        if found is None:
            done(self.absent(None), entry, None, -1)
        elif found.last_group > self._journal.synced_group and (after_all or not self.place(found, entry)[0]):
            self._journal.after(found.last_group, lambda: self._answer(found, entry, done))
        else:
            self._answer(found, entry, done)

    # docs/protocol.md B40
    def place(self, ledger: Ledger, entry: int) -> tuple[int, int]:
        """Return the place and the size in bytes of an entry. Returns NOWHERE if the entry is not stored here, and
        PLACE_UNKNOWN if its index cannot be read now."""
        try:
            return self._place(ledger, entry)
        except IndexBusy:
            return PLACE_UNKNOWN

    def _place(self, ledger: Ledger, entry: int) -> tuple[int, int]:
        """Return what `place` returns. Raises IndexBusy."""
        try:
            return ledger.index.get(entry)
        except IndexBusy:
            raise
        except OSError as error:
            self._log.emit(
                logging.WARNING, "entry cannot be looked up now ledger=%d entry=%d error=%s", ledger.id, entry, error
            )
            return PLACE_UNKNOWN

    def absent(self, ledger: Ledger | None) -> Status:
        """Return the status for an entry that is not stored here. It is UNKNOWN_LEDGER_STATE if records may be missing,
        otherwise NO_LEDGER or NO_ENTRY. `ledger` is None if the ledger is unknown here."""
        if ledger.is_limbo if ledger is not None else self._inventory.is_limbo:
            self._statistics.refused_unknown += 1
            return Status.UNKNOWN_LEDGER_STATE
        return Status.NO_LEDGER if ledger is None else Status.NO_ENTRY

    def _answer(self, ledger: Ledger, entry: int, done: ReadDone, *, waits: int = WAITS_MAX) -> None:
        if self._ledgers.get(ledger.id) is not ledger:  # it was dropped while the read waited
            done(self.absent(None), entry, None, -1)
            return
        index = ledger.index
        wanted = index.last if entry == LAST_ENTRY else entry
        try:
            place, size = self._place(ledger, wanted)
        except IndexBusy as busy:
            if waits:
                answer = partial(self._answer, ledger, entry, done, waits=waits - 1)
                self._inventory.index_files.after_rebuild(busy.file, answer)
                return
            place, size = PLACE_UNKNOWN
        if not place:
            done(self.absent(ledger), entry, None, ledger.lac)
            return
        body = self.body(ledger.id, wanted, place, size)
        if body is None:
            self._statistics.refused_unknown += 1
            done(Status.IO_ERROR, entry, None, ledger.lac)
            return
        self._statistics.read_bytes += size
        done(Status.OK, entry, body, ledger.lac)

    def read_on(
        self, ledger: int, entry: int, body: bytes, limits: tuple[int, int], *, passes_over: bool = False
    ) -> list[bytes]:
        """Return `body`, the packet already read for `entry`, and the packets of the entries after it. `limits` are the
        maximum number of entries and of bytes; each packet counts 4 bytes more than its size.

        An unreadable entry ends the batch; a read that begins with that entry reports the reason. A missing entry ends
        the batch too, unless `passes_over` is True; the limit in entries then counts ids. The batch also ends after
        TURN_S, so a slow disk makes it short.
        """
        ids_max, left = limits
        ends_at = self._loop.time() + TURN_S
        bodies, found = [body], self._ledgers.get(ledger)
        if entry == LAST_ENTRY or found is None:
            return bodies  # nothing follows the last entry
        left -= 4 + len(body)
        for following in range(entry + 1, min(entry + ids_max, found.index.last + 1)):
            place, size = self.place(found, following)
            if not place and passes_over:
                continue
            if self._loop.time() >= ends_at:
                break
            left -= 4 + size
            packet = self.body(ledger, following, place, size) if place and left >= 0 else None
            if packet is None:
                break
            self._statistics.read_bytes += size
            bodies.append(packet)
        return bodies

    def body(self, ledger: int, entry: int, place: int, size: int) -> bytes | None:
        """Return a stored packet whose checksum is valid. Returns None if the packet is damaged, which is counted and
        logged, or cannot be read now."""
        if place == PLACE_UNKNOWN[0]:
            return None
        segment = self._inventory.segments.get(place >> OFFSET_BITS)
        body = None
        try:
            if segment is not None:
                body = segment.read_body(place & OFFSET_MASK, size, ledger=ledger, entry=entry)
        except OSError as error:
            self._log.emit(
                logging.WARNING, "entry cannot be read now ledger=%d entry=%d error=%s", ledger, entry, error
            )
            return None
        if body is None:
            self._statistics.damaged_records += 1
            self._inventory.note_damaged(ledger, entry, place)
            self._log.emit(
                logging.ERROR, "damaged entry ledger=%d entry=%d segment=%d", ledger, entry, place >> OFFSET_BITS
            )
        return body

    def read_lac(self, ledger: int, *, done: Callable[[Status, bytes | None, bytes | None], Any]) -> None:
        """Read the last explicit LAC packet and the last entry packet. Either may be None; if both are missing, the
        status is NO_ENTRY."""
        found = self._ledgers.get(ledger)
        if found is None:
            done(Status.NO_ENTRY if self.absent(None) is Status.NO_LEDGER else self.absent(None), None, None)
            return
        explicit = found.explicit_lac or None
        last = found.index.last
        place, size = self.place(found, last)
        body = self.body(ledger, last, place, size) if place else None
        if explicit is None and body is None:
            done(Status.IO_ERROR if place else self.absent(found), None, None)
            return
        done(Status.OK, explicit, body)

    def long_poll(self, ledger: int, previous_lac: int, timeout_ms: int, *, done: ReadDone) -> Callable[[], None]:
        """Answer once the LAC has passed `previous_lac`, with the entry after `previous_lac` if it is stored here, or
        without an entry after `timeout_ms` milliseconds. Return a function that cancels the request; `done` is then not
        called."""
        found = self._ledgers.get(ledger)
        if found is None:
            done(self.absent(None), LAST_ENTRY, None, -1)
        elif found.lac > previous_lac or timeout_ms <= 0:
            self._answer_poll(found, previous_lac, done)
        else:
            return self._wait(found, previous_lac, min(timeout_ms, self._poll_ms_max), done)
        return _nothing

    def listen(self, ledger: int, listener: LedgerListener) -> Callable[[], None] | None:
        """Notify `listener` of each packet of the ledger once it is on disk, and of the LAC, starting with the current
        LAC. Return a function that removes the listener, or None if the ledger is unknown here. A ledger that is
        dropped sends no more notifications."""
        found = self._ledgers.get(ledger)
        if found is None:
            return None

        def end() -> None:
            found.listeners = tuple(each for each in found.listeners if each is not listener)

        found.listeners += (listener,)
        listener.lac_raised(found.lac)
        return end

    def _wait(self, ledger: Ledger, previous_lac: int, timeout_ms: int, done: ReadDone) -> Callable[[], None]:
        def check() -> None:
            if ledger.lac <= previous_lac and self._ledgers.get(ledger.id) is ledger:
                ledger.waiters[check] = None
                return
            timer.cancel()
            self._answer_poll(ledger, previous_lac, done)

        def give_up() -> None:
            del ledger.waiters[check]
            self._answer_poll(ledger, previous_lac, done)

        def cancel() -> None:
            timer.cancel()
            ledger.waiters.pop(check, None)

        timer = self._loop.call_later(timeout_ms / 1000, give_up)
        ledger.waiters[check] = None
        return cancel

    def _answer_poll(self, ledger: Ledger, previous_lac: int, done: ReadDone, *, has_waited: bool = False) -> None:
        """Answer a long poll. If the entry may be in progress, wait for the records accepted so far, but not for later
        ones: the entry may be on other bookies only, and something of a busy ledger is always in progress."""
        if self._ledgers.get(ledger.id) is not ledger:
            done(Status.NO_LEDGER, LAST_ENTRY, None, -1)
            return
        entry = previous_lac + 1
        place, size = self.place(ledger, entry) if ledger.lac >= entry else NOWHERE
        may_come = ledger.lac >= entry and ledger.last_group > self._journal.synced_group
        if not place and may_come and not has_waited:
            answer = partial(self._answer_poll, ledger, previous_lac, done, has_waited=True)
            self._journal.after(ledger.last_group, answer)
            return
        body = self.body(ledger.id, entry, place, size) if place else None
        done(Status.OK, LAST_ENTRY if body is None else entry, body, ledger.lac)

    def list_entries(self, ledger: int, *, done: Callable[[Status, Sequence[tuple[int, int]]], Any]) -> None:
        """List the ledger's entries stored here, as (first, count) runs in ascending order. A ledger in limbo is listed
        too, because repair must know which entries are here. No caller may conclude from a list that an entry was never
        written (docs/protocol.md, B7, B14)."""
        found = self._ledgers.get(ledger)
        if found is None:
            done(self.absent(None), ())
        else:
            self._journal.after(found.last_group, lambda: self._list(found, done))

    def _list(
        self, ledger: Ledger, done: Callable[[Status, Sequence[tuple[int, int]]], Any], *, waits: int = WAITS_MAX
    ) -> None:
        if self._ledgers.get(ledger.id) is not ledger:  # it was dropped while the call waited
            done(self.absent(None), ())
            return
        try:
            runs = self._inventory.runs(ledger)
        except OSError as error:
            if isinstance(error, IndexBusy) and waits:
                again = partial(self._list, ledger, done, waits=waits - 1)
                self._inventory.index_files.after_rebuild(error.file, again)
                return
            self._log.emit(logging.WARNING, "entries cannot be listed now ledger=%d error=%s", ledger.id, error)
            done(Status.IO_ERROR, ())
        else:
            done(Status.OK, runs)
