"""Records what a bookie knows about a ledger besides its entries, such as its key, fence and limbo state. Every fact
goes to both the journal and the inventory."""

from __future__ import annotations

from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.journal.record import ADMITTED, CLEARED, RECORD_HEADER_SIZE, RecordKind
from kvstore.bookie.journal.reserve import JournalFull, Use
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.statistics import Statistics
from kvstore.proto.bookkeeper import Status


class Facts:
    """Writes facts about ledgers. A fact is on disk once the journal has synced the ledger's `last_group`."""

    def __init__(self, inventory: Inventory, journal: Journal, statistics: Statistics) -> None:
        self._inventory = inventory
        self._ledgers = inventory.ledgers
        self._journal = journal
        self._statistics = statistics

    def note(
        self, kind: RecordKind, flags: int, ledger: Ledger, entry: int, body: bytes, *, urgent: bool = True,
        use: Use = Use.FACT,
    ) -> None:  # fmt: skip
        """Append a record about `ledger` to the journal. Raises JournalFull if there is no space for this `use`."""
        self._journal.append(kind, flags, ledger.id, entry, body, urgent=urgent, use=use)
        group = self._journal.open_group
        group.segment.touched.add(ledger.id)
        ledger.last_group = group.number

    def first_contact(self, ledger: int, key: bytes, *, flags: int = 0, use: Use = Use.ADD, size: int = 0) -> Ledger:
        """Return the ledger, after recording its key in the journal if it is not recorded yet. Raises JournalFull if
        there is no space for the key and for the `size` bytes of the packet that follows."""
        found = self._ledgers.get(ledger)
        if found is not None and found.key and found.is_admitted >= bool(flags):
            return found
        if not self._journal.has_capacity(use, 2 * RECORD_HEADER_SIZE + len(key) + size):
            raise JournalFull
        found = self._inventory.known(ledger, key)
        self.note(RecordKind.KEY, flags | ADMITTED * found.is_admitted, found, -1, key, use=use)
        found.is_admitted |= bool(flags)
        return found

    def fence(self, ledger: int, key: bytes) -> Status:
        """Fence the ledger against ordinary adds. Returns OK if the ledger is fenced, possibly before this call, and
        IO_ERROR if the journal has no space for the fence. The fence is durable only after the next sync."""
        found = self._ledgers.get(ledger)
        if found is not None and found.is_fenced:
            return Status.OK
        try:
            found = self._inventory.known(ledger, key)
            self.note(RecordKind.FENCE, 0, found, -1, key)
        except JournalFull:
            return Status.IO_ERROR
        found.is_fenced = True
        self._statistics.fences += 1
        return Status.OK

    def set_limbo(self, ledger: Ledger, is_limbo: bool) -> None:
        """Record whether records of `ledger` may be missing. Raises JournalFull."""
        ledger.is_limbo = is_limbo
        ledger.is_admitted &= not is_limbo
        self.note(RecordKind.LIMBO, 0 if is_limbo else CLEARED, ledger, -1, b"")
