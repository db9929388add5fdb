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


class Group(Struct, eq=False):
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
