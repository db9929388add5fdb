"""To which server the operations of each partition go, and when they may go to another one. Decides only.

A partition's operations go to another server only when none of them is under way to the former one: one that comes back
has to be done before those that came later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.flight import Flight
from kvstore.types import PartitionId, ServerId

ASK_AGAIN_S = 0.1
"""How long a server that refused as not the leader is left alone while the topology still names it."""


class Routes:
    """The links that are open, and which partition's operations use which."""

    def __init__(self) -> None:
        self.flights: dict[ServerId, Flight] = {}
        self.sent_to: dict[PartitionId, ServerId] = {}
        """Where the operations of a partition went last, if to another server. Some may still be under way there."""
        self.direct: dict[PartitionId, Flight] = {}
        """The flights that a partition's next operation may join, without asking the router, behind those before it."""
        self._refused_by: dict[PartitionId, tuple[ServerId, float]] = {}
        """Servers that did not lead what the topology said they lead, and until when they are not asked again."""

    def open(self, flight: Flight) -> None:
        self.flights[flight.server] = flight

    def lost(self, flight: Flight) -> None:
        if self.flights.get(flight.server) is flight:
            del self.flights[flight.server]
        self.direct = {partition: each for partition, each in self.direct.items() if each is not flight}

    def take(self, partition: PartitionId, flight: Flight, *, is_direct: bool) -> None:
        """Send the partition's operations by this flight from now on, once `is_settled` has said so."""
        self.sent_to[partition] = flight.server
        if is_direct:
            self.direct[partition] = flight

    def end_direct(self, partition: PartitionId) -> None:
        """Let the router decide where the partition's next operation goes: something may be in its way."""
        self.direct.pop(partition, None)

    def is_settled(self, partition: PartitionId, server: ServerId) -> bool:
        """Whether nothing is under way elsewhere that may come back and should be done before what goes to `server`."""
        former = self.sent_to.get(partition, server)
        if former != server:
            if self._carries(former, partition):
                return False
            del self.sent_to[partition]
            self.end_direct(partition)
        return True

    def note_refused(self, partition: PartitionId, server: ServerId, now: float) -> None:
        """The server does not lead the partition: it is left alone for a while."""
        self._refused_by[partition] = (server, now + ASK_AGAIN_S)
        self.end_direct(partition)

    def is_left_alone(self, partition: PartitionId) -> bool:
        return partition in self._refused_by

    def ask_again(self, partition: PartitionId, now: float) -> None:
        """Ask the server that refused again when the pause is over and nothing of the partition is under way to it:
        what may still come back goes first."""
        refused = self._refused_by.get(partition)
        if refused is not None and refused[1] <= now and not self._carries(refused[0], partition):
            del self._refused_by[partition]

    def note_leaders(self, before: ClusterTopology, after: ClusterTopology, now: float) -> None:
        """Note the leaders: a server that refused may lead by now, or another one."""
        self.direct.clear()
        for partition in sorted(self._refused_by):
            if after.leaders.get(partition) != before.leaders.get(partition):
                self._refused_by[partition] = (self._refused_by[partition][0], 0.0)
                self.ask_again(partition, now)

    def misdirected(self, partition_of: Callable[[bytes], PartitionId]) -> Iterator[tuple[Flight, list[int]]]:
        """Yield for each link the numbers of operations that are under way to a partition which does not own all of
        their keys."""
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
                assert not pending.is_of_peer, "what another server sent is never sent on"
                assert self.sent_to.get(partition) == server, "a partition's operations are under way to one server"
        for partition, flight in self.direct.items():
            assert self.sent_to[partition] == flight.server
