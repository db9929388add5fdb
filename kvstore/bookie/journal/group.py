"""Records that the journal writes and syncs as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import Ledger
from kvstore.env.ports import File

Stored = tuple[Ledger, int, int, bytes, int, Callable[..., Any]]
"""Ledger, entry, offset of the record, packet, its LAC, and whom to tell."""


class JournalGroup(Struct, eq=False):
    """Records that share a sync."""

    number: int
    segment: Segment
    file: File
    """The segment's."""
    start: int
    end: int
    buffers: list[bytes] = []
    adds: list[Stored] = []
    after: list[Callable[[], None]] = []
    """Called when the group is on the disk, after its adds were told."""
    next: Segment | None = None
    """The segment after this one, if this is a segment's last group."""
    packets: dict[tuple[Ledger, int], bytes] = {}
    """The packets of the first adds, by ledger and entry: as many as `packet` has looked at."""
    looked_at: int = 0

    def packet(self, ledger: Ledger, entry: int) -> bytes | None:
        """Return the packet of an entry in this group, or None. Only calls of this pay for the table."""
        for each in self.adds[self.looked_at :]:
            self.packets[each[0], each[1]] = each[3]
        self.looked_at = len(self.adds)
        return self.packets.get((ledger, entry))
