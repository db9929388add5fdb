"""An entry that is not acknowledged yet, and whom to answer when it is. Decides only."""

from __future__ import annotations

from collections.abc import Sized
from math import inf

import msgspec

from kvstore.errors import Overloaded
from kvstore.partition.leading.answers import Reply
from kvstore.partition.leading.evaluate import NextEntry

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
