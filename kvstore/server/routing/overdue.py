"""Operations that have been under way to other servers, or have waited for a leader, for too long: found by a look at
them now and then, so that the others cost nothing. Decides only; overdue_watch.py looks."""

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

LOOKED_AT_MAX = 32
"""Operations of one link, or of one line: the oldest."""
KNOWN_MAX = 256


class OverdueOperation(NamedTuple):
    """An operation that takes too long, and since when at least."""

    at: Literal["link", "waiting"]
    partition: PartitionId
    op: Op
    since: float


class Overdue:
    """The overdue operations of one server. One that takes longer than `limit_s` is told when it is over, with the time
    that it took at least."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looks: dict[ServerId, tuple[Flight, deque[tuple[float, int]]]] = {}
        """By server, its flight, and the flight's last number at the times of the latest looks."""
        self._known: dict[Hashable, OverdueOperation] = {}

    def look(
        self, now: float, flights: Mapping[ServerId, Flight], lines: Mapping[PartitionId, list[Pending]]
    ) -> list[OverdueOperation]:
        """Return those that are over by now."""
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
        self._looks = {server: found for server, found in self._looks.items() if flights.get(server) is found[0]}
        before = now - self._limit_s
        for server, flight in sorted(flights.items()):
            _, looks = self._looks.setdefault(server, (flight, deque()))
            looks.append((now, flight.last_number))
            while len(looks) > 1 and looks[1][0] <= before:
                looks.popleft()
            since, last = looks[0]
            if since > before:
                continue
            for number, (partition, pending) in islice(flight.pending.items(), LOOKED_AT_MAX):
                if number > last:
                    break
                yield (server, id(flight), number), OverdueOperation("link", partition, pending.op, since)
        for partition, line in sorted(lines.items()):
            for pending in line[:LOOKED_AT_MAX]:
                since = pending.deadline - WAIT_S
                if since <= before:
                    yield (partition, pending.order), OverdueOperation("waiting", partition, pending.op, since)
