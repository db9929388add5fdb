"""The balancer's knowledge of the cluster at one moment: the values of which a plan is a function. Decides only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvstore.ring import PartitionState, Ring
from kvstore.ring.ring import TokenRange
from kvstore.server.load.load import PartitionLoad
from kvstore.types import PartitionId, ServerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """A running server that may hold replicas and lead."""

    zone: str = ""
    disk_used: int = 0
    """Bytes in use on the disk of its data directory."""
    disk_total: int = 0
    """Size of that disk in bytes; 0 if unknown."""

    @property
    def used(self) -> float:
        """Part of the disk that is used, from 0 to 1; 0 if unknown."""
        return self.disk_used / self.disk_total if self.disk_total else 0.0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The cluster at one moment."""

    ring: Ring
    servers: Mapping[ServerId, ServerState]
    leaders: Mapping[PartitionId, ServerId]
    loads: Mapping[PartitionId, PartitionLoad] = field(default_factory=dict)
    keys: Mapping[PartitionId, int] = field(default_factory=dict)
    unfit: frozenset[tuple[PartitionId, ServerId]] = frozenset()
    """Replicas that are down, far behind, or failing, and must not get a lead."""
    obstacles: tuple[str, ...] = ()
    """Reasons why the cluster must be left alone now."""

    @cached_property
    def serving(self) -> list[PartitionId]:
        """The partitions that own ranges and stay, sorted."""
        members = self.ring.partitions
        return [each for each in sorted(members) if members[each].state is PartitionState.SERVING]

    def may_lead(self, partition: PartitionId, server: ServerId) -> bool:
        """Return True if the server has a replica of the partition that could lead now."""
        member = self.ring.partitions[partition]
        changing = {each for pair in member.replacing for each in pair}
        return (
            server in member.replicas
            and server in self.servers
            and server not in changing
            and (partition, server) not in self.unfit
        )

    @cached_property
    def expected(self) -> Mapping[PartitionId, ServerId]:
        """The server that leads each serving partition once handovers that are due have ended: a step that was made
        counts before it has taken effect."""
        found = {}
        for partition in self.serving:
            preferred = self.ring.partitions[partition].replicas[0]
            leader = preferred if self.may_lead(partition, preferred) else self.leaders.get(partition)
            if leader is not None:
                found[partition] = leader
        return found

    def work(self, partition: PartitionId) -> float:
        """Return the work per second of a partition's leader; 0 if unknown."""
        return self.loads[partition].work_per_s if partition in self.loads else 0.0

    @cached_property
    def works(self) -> Mapping[ServerId, float]:
        """The work per second of each server as a leader."""
        found = dict.fromkeys(sorted(self.servers), 0.0)
        for partition, leader in self.expected.items():
            if leader in found:
                found[leader] += self.work(partition)
        return found

    @cached_property
    def mean(self) -> float:
        """The mean work of a server."""
        return sum(self.works.values()) / len(self.works) if self.works else 0.0

    @cached_property
    def ranges(self) -> Mapping[PartitionId, Sequence[TokenRange]]:
        """The ranges of each partition."""
        return self.ring.ranges_by_owner()

    @cached_property
    def shares(self) -> Mapping[PartitionId, float]:
        """The part of the hash space that each partition owns."""
        return self.ring.shares()

    def leads_of(self, server: ServerId) -> list[PartitionId]:
        """Return the partitions that the server leads or is about to lead, sorted."""
        return [partition for partition, leader in self.expected.items() if leader == server]
