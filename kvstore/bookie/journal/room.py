"""Decides what may still be written when the disk is full, and how much of the room is kept for what must not fail.
Decides only (docs/protocol.md, B9 and B20).

Were all equal, copies would eat the room of fences and of reclaim, and what frees a full disk could not be written
down: it would stay full for good.
"""

from __future__ import annotations

from enum import IntEnum

MIB = 1 << 20
KEPT_MAX = 8 * MIB
KEPT_SHARE = 8
"""An eighth of a segment, up to 8 MiB: about 90,000 fences."""


class JournalFull(Exception):
    """There is no room for the record, what is kept for it included."""


class Use(IntEnum):
    """The purpose of a record. The later in this list, the longer there is room for it."""

    ADD = 0
    """Ordinary adds, and explicit last-add-confirmed: none once there is no segment ahead."""
    COPY = 1
    """Recovery adds."""
    REWRITE = 2
    """Live entries of a segment that is then removed: more becomes free than they take."""
    FACT = 3
    """Fences, what is known of ledgers and segments, notes of reclaim."""


def kept_bytes(segment_bytes: int) -> int:
    """How many bytes of the present segment recovery adds must leave free on a full disk."""
    return min(KEPT_MAX, segment_bytes // KEPT_SHARE)


def start_bytes(segment_bytes: int) -> int:
    """Of a full disk: what no small segment takes, because a start needs one of its own. A bookie that cannot start
    answers no reads either."""
    return kept_bytes(segment_bytes) // 4


def leaves(use: Use, segment_bytes: int) -> int:
    """How many bytes of the present segment a record must leave free on a full disk."""
    kept = kept_bytes(segment_bytes)
    if use is Use.FACT:
        return 0
    return kept // 2 if use is Use.REWRITE else kept
