"""Records that the journal writes and syncs together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import Ledger
from kvstore.env.ports import File

Stored = tuple[Ledger, int, int, bytes, int, Callable[..., Any]]
"""Ledger, entry, offset of the record, packet, its LAC, and the callback of the sender."""


class JournalGroup(Struct, eq=False):
    """Records that share a sync."""

    number: int
    segment: Segment
    file: File
    """The segment's file."""
    start: int
    end: int
    buffers: list[bytes] = []
    adds: list[Stored] = []
    after: list[Callable[[], None]] = []
    """Called when the group is on disk, after the callbacks of its adds."""
    next: Segment | None = None
    """The next segment, if this is the last group of its segment."""
    packets: dict[tuple[Ledger, int], bytes] = {}
    """The packets of the first `indexed` adds, by ledger and entry."""
    indexed: int = 0

    def packet(self, ledger: Ledger, entry: int) -> bytes | None:
        """Return the packet of an entry in this group, or None. The table is only built by calls of this method."""
        for each in self.adds[self.indexed :]:
            self.packets[each[0], each[1]] = each[3]
        self.indexed = len(self.adds)
        return self.packets.get((ledger, entry))
