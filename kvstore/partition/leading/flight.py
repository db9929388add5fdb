"""An entry that is not acknowledged yet, and whom to answer when it is. Decides only."""

from __future__ import annotations

from collections.abc import Sized
from math import inf

import msgspec

from kvstore.env.slow_log import SlowLog
from kvstore.errors import Overloaded
from kvstore.partition.leading.answers import Reply
from kvstore.partition.leading.evaluate import NextEntry
from kvstore.types import PartitionId

FLIGHTS_MAX = 256
"""Entries of one leader on their way, with records that wait for none before them. Fewer than its log takes."""


class Flight(msgspec.Struct):
    """From its append to its acknowledgement."""

    made: NextEntry
    replies: list[Reply]
    observed: list[Reply] = []
    """Answers found in what this entry and those before it make of the state."""
    arrived: float = inf
    """When the first of its operations came; `inf`: it has none."""


def check_room(flights: Sized) -> None:
    """Refuse a record before anything has been decided on it: what the log itself refuses, the leader has sent already,
    and would wait for. Raises Overloaded."""
    if len(flights) >= FLIGHTS_MAX:
        raise Overloaded(f"{len(flights)} entries wait for their acknowledgement")


def note_slow(slow: SlowLog, partition: PartitionId, flight: Flight, sent_at: float, now: float) -> None:
    """Put an entry that is acknowledged and applied `now` into the slow log."""
    keys = flight.made.entry.keys
    slow.note(
        *("leader", "write", now - flight.arrived),
        key=keys[0] if keys else None,
        partition=partition,
        operations=len(flight.replies),
        queue=sent_at - flight.arrived,
        log=now - sent_at,
    )
