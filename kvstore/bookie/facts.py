"""Records everything that a bookie knows of a ledger besides its entries, such as its key, fence and limbo state, in
both the journal and the inventory."""

from __future__ import annotations

from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, CLEARED, RECORD_HEADER_SIZE, RecordKind
from kvstore.bookie.journal.room import JournalFull, Use
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import Status


class Facts:
    """Writes facts about ledgers. A fact is on disk once the ledger's `last_group` is."""

    def __init__(self, inventory: Inventory, journal: Journal, statistics: Statistics) -> None:
        self._inventory = inventory
        self._ledgers = inventory.ledgers
        self._journal = journal
        self._statistics = statistics

    def note(
        self, kind: RecordKind, flags: int, ledger: Ledger, entry: int, body: bytes, *, urgent: bool = True,
        use: Use = Use.FACT,
    ) -> None:  # fmt: skip
        """Append a record about a ledger. Raises JournalFull."""
        self._journal.append(kind, flags, ledger.id, entry, body, urgent=urgent, use=use)
        group = self._journal.open_group
        group.segment.touched.add(ledger.id)
        ledger.last_group = group.number

    def first_contact(self, ledger: int, key: bytes, *, flags: int = 0, use: Use = Use.ADD, size: int = 0) -> Ledger:
        """Return the ledger with its key recorded in the journal. Raises JournalFull if there is no space for that and
        for the `size` bytes that follow."""
        found = self._ledgers.get(ledger)
        if found is not None and found.key and found.is_admitted >= bool(flags):
            return found
        if not self._journal.has_room(use, 2 * RECORD_HEADER_SIZE + len(key) + size):
            raise JournalFull
        found = self._known(ledger, key)
        self.note(RecordKind.KEY, flags | ADMITTED * found.is_admitted, found, -1, key, use=use)
        found.is_admitted |= bool(flags)
        return found

    def _known(self, ledger: int, key: bytes) -> Ledger:
        """Return the ledger's record in the inventory, created if needed. A new ledger is in limbo while records of any
        ledger may be missing."""
        is_new = ledger not in self._ledgers
        found = self._inventory.known(ledger, key)
        if is_new and self._inventory.is_limbo:
            self.set_limbo(found, True)
        return found

    def fence(self, ledger: int, key: bytes) -> Status:
        """Fence the ledger against ordinary adds. Return IO_ERROR if the fence cannot be recorded."""
        found = self._ledgers.get(ledger)
        if found is not None and found.is_fenced:
            return Status.OK
        try:
            found = self._known(ledger, key)
            self.note(RecordKind.FENCE, 0, found, -1, key)
        except JournalFull:
            return Status.IO_ERROR
        found.is_fenced = True
        self._statistics.fences += 1
        return Status.OK

    def set_limbo(self, ledger: Ledger, is_limbo: bool) -> None:
        """Record that records of `ledger` may be missing, or that they are complete again. Raises JournalFull."""
        ledger.is_limbo = is_limbo
        ledger.is_admitted &= not is_limbo
        self.note(RecordKind.LIMBO, 0 if is_limbo else CLEARED, ledger, -1, b"")
