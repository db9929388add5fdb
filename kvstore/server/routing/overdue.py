"""Finds operations that have been in transit to another server, or have waited for a leader, for too long. A
periodic check finds them, so that operations need no timers. Decides only; overdue_watch.py performs the check."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from itertools import islice
from typing import Literal, NamedTuple

from kvstore.partition.state.commands import Op
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import Pending
from kvstore.server.routing.redirects import WAIT_S
from kvstore.types import PartitionId, ServerId

CHECKED_MAX = 32
"""Maximum number of operations that one check examines per link or line, oldest first."""
KNOWN_MAX = 256


class OverdueOperation(NamedTuple):
    """An operation that takes too long, and the time by which it had begun."""

    at: Literal["link", "waiting"]
    partition: PartitionId
    op: Op
    since: float


class Overdue:
    """The overdue operations of one server. An operation that takes longer than `limit_s` seconds is reported once
    it has ended, with a lower bound of its duration."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._samples: dict[ServerId, tuple[Flight, deque[tuple[float, int]]]] = {}
        """Server → its operations in flight, and for each of the latest checks the time and the last number in
        flight."""
        self._known: dict[Hashable, OverdueOperation] = {}

    def check(
        self, now: float, flights: Mapping[ServerId, Flight], lines: Mapping[PartitionId, list[Pending]]
    ) -> list[OverdueOperation]:
        """Check the operations in `flights` and `lines`. Return the overdue operations that have ended since the
        last check."""
        seen: dict[Hashable, OverdueOperation] = {}
        for name, late in self._all_late(now, flights, lines):
            if name in self._known:
                seen[name] = self._known[name]
            elif len(seen) < KNOWN_MAX:
                seen[name] = late
        ended = [late for name, late in self._known.items() if name not in seen]
        self._known = seen
        return ended

    def _all_late(
        self, now: float, flights: Mapping[ServerId, Flight], lines: Mapping[PartitionId, list[Pending]]
    ) -> Iterator[tuple[Hashable, OverdueOperation]]:
        self._samples = {server: found for server, found in self._samples.items() if flights.get(server) is found[0]}
        before = now - self._limit_s
        for server, flight in sorted(flights.items()):
            _, samples = self._samples.setdefault(server, (flight, deque()))
            samples.append((now, flight.last_number))
            while len(samples) > 1 and samples[1][0] <= before:
                samples.popleft()
            since, last = samples[0]
            if since > before:
                continue
            for number, (partition, pending) in islice(flight.pending.items(), CHECKED_MAX):
                if number > last:
                    break
                yield (server, id(flight), number), OverdueOperation("link", partition, pending.op, since)
        for partition, line in sorted(lines.items()):
            for pending in line[:CHECKED_MAX]:
                since = pending.deadline - WAIT_S
                if since <= before:
                    yield (partition, pending.order), OverdueOperation("waiting", partition, pending.op, since)
