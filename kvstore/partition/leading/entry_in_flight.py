"""A log entry that is not acknowledged yet, with the replies to deliver once it is acknowledged. Decides only."""

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
"""Maximum number of entries that one leader has in flight, its control records included: these do not wait for a free
slot as batches of writes do. Less than the log accepts."""


class EntryInFlight(msgspec.Struct):
    """A log entry between its append and its acknowledgement."""

    made: NextEntry
    replies: list[Reply]
    arrived: float = inf
    """Arrival time of its first operation; `inf` if it has none."""


def check_capacity(in_flight: Sized) -> None:
    """Raise Overloaded if no further entry may be in flight. Call it before anything is decided about a record.
    Otherwise the log could refuse a record that the leader already counts as sent and waits for."""
    if len(in_flight) >= ALL_IN_FLIGHT_MAX:
        raise Overloaded(f"{len(in_flight)} entries wait for their acknowledgement; retry later")


def note_slow(slow: SlowLog, partition: PartitionId, entry: EntryInFlight, sent_at: float, now: float) -> None:
    """Record the entry in the slow log if it was slow. The entry was acknowledged and applied at `now`."""
    keys = entry.made.entry.keys
    slow.note(
        "leader",
        "write",
        now - entry.arrived,
        key=keys[0] if keys else None,
        partition=partition,
        operations=len(entry.replies),
        queue=sent_at - entry.arrived,
        log=now - sent_at,
    )
