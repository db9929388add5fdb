"""Decides what may still be written when the disk is full, and how much space is reserved for records that must not
fail. Decides only (docs/protocol.md, B9 and B20).

If all records were equal, copies would use the space of fences and of reclaim. Then the records that free a full disk
could not be written, and the disk would stay full.
"""

from __future__ import annotations

from enum import IntEnum

MIB = 1 << 20
KEPT_MAX = 8 * MIB
KEPT_SHARE = 8
"""An eighth of a segment, up to 8 MiB: about 90,000 fences."""


class JournalFull(Exception):
    """The journal has no space for the record, not even in the reserve."""


class Use(IntEnum):
    """The purpose of a record. On a full disk, later members of this list still find space when earlier ones no longer
    do."""

    ADD = 0
    """Ordinary adds, and explicit last-add-confirmed: none once there is no segment ahead."""
    COPY = 1
    """Recovery adds."""
    REWRITE = 2
    """Live entries of a segment that is then removed: this frees more than the entries take."""
    FACT = 3
    """Fences, the state of ledgers and segments, records of reclaim."""


def kept_bytes(segment_bytes: int) -> int:
    """Return the number of bytes of the current segment that recovery adds must leave free on a full disk."""
    return min(KEPT_MAX, segment_bytes // KEPT_SHARE)


def start_bytes(segment_bytes: int) -> int:
    """Return the number of bytes of a full disk that small segments must leave free, because a start needs a segment of
    its own. A bookie that cannot start does not answer reads either."""
    return kept_bytes(segment_bytes) // 4


def leaves(use: Use, segment_bytes: int) -> int:
    """Return the number of bytes of the current segment that a record for `use` must leave free on a full disk."""
    kept = kept_bytes(segment_bytes)
    if use is Use.FACT:
        return 0
    return kept // 2 if use is Use.REWRITE else kept
