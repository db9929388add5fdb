"""Records that the journal writes and syncs as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.bookie.journal.record import GROUP_HEADER_SIZE
from kvstore.bookie.journal.segment import Segment
from kvstore.bookie.ledger import Ledger

Stored = tuple[Ledger, int, int, bytes, int, Callable[..., Any]]
"""Ledger, entry, offset of the record, packet, its LAC, and whom to tell."""


class Group:
    """Records that share a sync."""

    __slots__ = ("adds", "after", "buffers", "end", "next", "number", "segment", "start")

    def __init__(self, number: int, segment: Segment, start: int) -> None:
        self.number = number
        self.segment = segment
        self.start = start
        self.end = start + GROUP_HEADER_SIZE
        self.buffers: list[bytes] = []
        self.adds: list[Stored] = []
        self.after: list[Callable[[], None]] = []
        """Called when the group is on the disk, after its adds were told."""
        self.next: Segment | None = None
        """The segment after this one, if this is a segment's last group."""
