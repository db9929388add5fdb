"""Decides to which server the operations of each partition are sent, and when they may be sent to another server.
Decides only.

A partition's operations are sent to another server only when none of them is in transit to the previous one, because an
operation that is refused and comes back must be executed before later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.flight import Flight
from kvstore.types import PartitionId, ServerId

ASK_AGAIN_S = 0.1
"""Seconds for which a server that refused an operation because it does not lead the partition is not asked again,
while the topology still names it as the leader."""


class Routes:
    """The open links, and the link that carries each partition's operations."""

    def __init__(self) -> None:
        self.flights: dict[ServerId, Flight] = {}
        self.sent_to: dict[PartitionId, ServerId] = {}
        """The other server to which a partition's operations were last sent. Some may still be in transit."""
        self.direct: dict[PartitionId, Flight] = {}
        """The flight that a partition's next operation may join, behind earlier ones, without the router."""
        self._refused_by: dict[PartitionId, tuple[ServerId, float]] = {}
        """Servers that refused as not the leader although the topology named them, and until when they are not asked
        again."""

    def open(self, flight: Flight) -> None:
        self.flights[flight.server] = flight

    def lost(self, flight: Flight) -> None:
        if self.flights.get(flight.server) is flight:
            del self.flights[flight.server]
        self.direct = {partition: each for partition, each in self.direct.items() if each is not flight}

    def take(self, partition: PartitionId, flight: Flight, *, is_direct: bool) -> None:
        """Send the partition's operations with this flight from now on. Call this only when `is_settled` is True."""
        self.sent_to[partition] = flight.server
        if is_direct:
            self.direct[partition] = flight

    def end_direct(self, partition: PartitionId) -> None:
        """Route the partition's next operation through the router, because other operations may have to be sent
        first."""
        self.direct.pop(partition, None)

    def is_settled(self, partition: PartitionId, server: ServerId) -> bool:
        """Return True if no operation of the partition is in transit to another server than `server`. Such an
        operation may come back, and must then be executed before later ones."""
        former = self.sent_to.get(partition, server)
        if former != server:
            if self._carries(former, partition):
                return False
            del self.sent_to[partition]
            self.end_direct(partition)
        return True

    def note_refused(self, partition: PartitionId, server: ServerId, now: float) -> None:
        """Record that the server refused as not the leader of the partition, and do not ask it for ASK_AGAIN_S
        seconds."""
        self._refused_by[partition] = (server, now + ASK_AGAIN_S)
        self.end_direct(partition)

    def is_backing_off(self, partition: PartitionId) -> bool:
        return partition in self._refused_by

    def ask_again(self, partition: PartitionId, now: float) -> None:
        """Allow asking the server again that refused, if the pause is over and no operation of the partition is in
        transit to it. Operations that may come back go first."""
        refused = self._refused_by.get(partition)
        if refused is not None and refused[1] <= now and not self._carries(refused[0], partition):
            del self._refused_by[partition]

    def note_leaders(self, before: ClusterTopology, after: ClusterTopology, now: float) -> None:
        """Apply changes of leaders. A server that refused before may be the leader by now."""
        self.direct.clear()
        for partition in sorted(self._refused_by):
            if after.leaders.get(partition) != before.leaders.get(partition):
                self._refused_by[partition] = (self._refused_by[partition][0], 0.0)
                self.ask_again(partition, now)

    def misdirected(self, partition_of: Callable[[bytes], PartitionId]) -> Iterator[tuple[Flight, list[int]]]:
        """Yield each link's flight with the numbers of operations that are in transit to a partition that does not
        own all of their keys."""
        for _, flight in sorted(self.flights.items()):
            yield flight, list(flight.misdirected(partition_of))

    def _carries(self, server: ServerId, partition: PartitionId) -> bool:
        flight = self.flights.get(server)
        return flight is not None and flight.carries(partition)

    def check(self) -> None:
        for server, flight in self.flights.items():
            flight.check()
            assert server == flight.server
            for partition, pending in flight.pending.values():
                assert not pending.is_of_peer, "operations of other servers are never forwarded"
                assert self.sent_to.get(partition) == server, "a partition's operations are in transit to one server"
        for partition, flight in self.direct.items():
            assert self.sent_to[partition] == flight.server
