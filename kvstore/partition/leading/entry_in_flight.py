"""An entry that is not acknowledged yet, and whom to answer when it is. Decides only."""

from __future__ import annotations

from collections.abc import Sized
from math import inf

import msgspec

from kvstore.env.slow_log import SlowLog
from kvstore.errors import Overloaded
from kvstore.partition.leading.evaluate import NextEntry
from kvstore.partition.state.commands import Reply
from kvstore.types import PartitionId

ALL_IN_FLIGHT_MAX = 256
"""Entries in flight of one leader: with its records, which do not wait for room as batches of writes do. Fewer than its
log takes."""


class EntryInFlight(msgspec.Struct):
    """An entry, from its append to its acknowledgement."""

    made: NextEntry
    replies: list[Reply]
    arrived: float = inf
    """When the first of its operations came; `inf`: it has none."""


def check_room(in_flight: Sized) -> None:
    """Refuse a record before anything has been decided on it: what the log refuses, the leader counts as sent already,
    and waits for. Raises Overloaded."""
    if len(in_flight) >= ALL_IN_FLIGHT_MAX:
        raise Overloaded(f"{len(in_flight)} entries wait for their acknowledgement")


def note_slow(slow: SlowLog, partition: PartitionId, entry: EntryInFlight, sent_at: float, now: float) -> None:
    """Put an entry that is acknowledged and applied `now` into the slow log."""
    keys = entry.made.entry.keys
    slow.note(
        *("leader", "write", now - entry.arrived),
        key=keys[0] if keys else None,
        partition=partition,
        operations=len(entry.replies),
        queue=sent_at - entry.arrived,
        log=now - sent_at,
    )
