"""Finds the copy of an entry that a ledger already has, and compares a new packet with it.

A bookie keeps one payload per ledger and entry (docs/protocol.md, L15 and B36). Every path that stores a packet asks
here first: adds, recovery adds, raw adds, rewrites by reclaim, records that a start writes again, the replay of a
segment and the rebuild of an index file.
"""

from __future__ import annotations

from enum import Enum, auto

from kvstore.bookie.digests import Digests, is_same_entry
from kvstore.bookie.index.entry_index import OFFSET_MASK, file_of
from kvstore.bookie.inventory import Inventory
from kvstore.bookie.journal.group import JournalGroup
from kvstore.bookie.journal.journal import Journal
from kvstore.bookie.ledger import Ledger
from kvstore.bookie.reader import Reader


class Copy(Enum):
    """The stored copy of an entry, compared with a new packet for the entry."""

    NONE = auto()
    IDENTICAL = auto()
    """The copy is identical to the packet, and is on disk."""
    IDENTICAL_SOON = auto()
    """The copy is identical to the packet, and will be on disk once the ledger's `last_group` is synced."""
    SAME = auto()
    """The copy has the same payload as the packet, but another last-add-confirmed."""
    OTHER = auto()
    """The copy has another payload."""
    DAMAGED = auto()
    """The stored bytes are damaged. The packet has the same size."""


class StoredCopies:
    """The entries of the ledgers in one directory, on disk or in a journal group that is not synced yet."""

    def __init__(self, inventory: Inventory, journal: Journal, reader: Reader, digests: Digests) -> None:
        self._segments = inventory.segments
        self._journal = journal
        self._reader = reader
        self._digests = digests
        self.shown: JournalGroup | None = None
        """The synced group that is being added to the inventory now."""

    def compare(self, ledger: Ledger, entry: int, packet: bytes) -> Copy:
        """Compare `packet` with the ledger's copy of the entry. Reads the disk if there is a copy. Raises OSError if
        the copy cannot be read now but may be intact."""
        waiting = self.waiting(ledger, entry)
        if waiting is not None:
            return Copy.IDENTICAL_SOON if waiting == packet else self._judge(ledger, waiting, packet)
        place, size = ledger.index.get(entry)
        if not place:
            return Copy.NONE
        if size != len(packet):
            return Copy.OTHER
        body = self._read(ledger, entry, place, size)
        if body is None:
            return Copy.DAMAGED
        return Copy.IDENTICAL if body == packet else self._judge(ledger, body, packet)

    def waiting(self, ledger: Ledger, entry: int) -> bytes | None:
        """Return the entry's packet in a group that is not synced yet, or None."""
        if ledger.last_group <= self._journal.synced_group and self.shown is None:
            return None
        groups = self._journal.unreported() if self.shown is None else [self.shown, *self._journal.unreported()]
        return next((body for each in reversed(groups) if (body := each.packet(ledger, entry)) is not None), None)

    def _read(self, ledger: Ledger, entry: int, place: int, size: int) -> bytes | None:
        """Return the stored packet, or None if it is damaged. Raises OSError if the error does not prove damage."""
        segment = self._segments.get(file_of(place))
        body = segment and segment.read_certainly(place & OFFSET_MASK, size, ledger=ledger.id, entry=entry)
        return body or self._reader.body(ledger.id, entry, place, size)  # which counts the damage

    def _judge(self, ledger: Ledger, held: bytes, packet: bytes) -> Copy:
        return Copy.SAME if is_same_entry(held, packet, self._digests.size_of(ledger.id, ledger.key)) else Copy.OTHER
