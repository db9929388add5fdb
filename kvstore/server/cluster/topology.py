"""A server's knowledge of its cluster: the ring, who leads, who is up. Immutable values, and their znodes' bytes.

Decides only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import orjson

from kvstore import versions
from kvstore.errors import NotLeader, StoreError, Unavailable
from kvstore.meta import codec
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId, ServerId

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A server that is up, as its znode `/servers/<id>` says."""

    id: str
    resp: str
    grpc: str = ""
    http: str = ""
    bookie: str = ""
    zone: str = ""
    roles: tuple[str, ...] = ()
    version: str = ""
    """The release of its software."""
    can: int = versions.FIRST
    """The highest cluster version that it can do; servers of the first release do not say it (docs/protocol.md V1)."""
    starting: bool = False
    """Whether it is still starting: what it can do does not count for a rise yet."""
    nonce: str = ""
    """A random value of its process: tells a restarted one from the one before."""
    draining: bool = False
    """Whether it hosts no replicas until it is started again."""

    def encode(self) -> bytes:
        return orjson.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes) -> Member:
        """Raises UndecodableNode for an unknown format, by number, and for anything that is not a member."""
        return codec.decode(Member, data, what="server znode", format=FORMAT)


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """One state of the cluster as this server has seen it; a change makes another."""

    ring: Ring
    leaders: Mapping[PartitionId, tuple[ServerId, int]] = field(default_factory=dict)
    """Leader, and the epoch that it had seen when it claimed; partitions without a leader are absent."""
    servers: Mapping[ServerId, Member] = field(default_factory=dict)

    def with_leader(self, partition: PartitionId, leader: tuple[ServerId, int] | None) -> ClusterTopology:
        """The same with another leader of one partition, or none."""
        leaders = {each: found for each, found in self.leaders.items() if each != partition}
        if leader is not None:
            leaders[partition] = leader
        return replace(self, leaders=leaders)

    def leader_of(self, partition: PartitionId) -> ServerId | None:
        """The partition's leader, None if nobody is known to lead it."""
        found = self.leaders.get(partition)
        return None if found is None else found[0]

    def is_led_by(self, server: ServerId, partition: PartitionId) -> bool:
        return self.leader_of(partition) == server

    def may_answer(self, partition: PartitionId, key: bytes, ring_version: int) -> bool:
        """Whether the partition may answer for the key to a sender that goes by another version of the ring
        (docs/protocol.md M16)."""
        member = self.ring.partitions.get(partition)
        return member is not None and ring_version >= member.owned_at and self.ring.partition_of(key) == partition

    def not_leader(self, partition: PartitionId) -> NotLeader:
        """Make the error for a caller of the wrong server: it names the leader and its address."""
        leader = self.leader_of(partition)
        if leader is None:
            return NotLeader(partition)
        member = self.servers.get(leader)
        return NotLeader(partition, leader, member.grpc if member else "")

    def nobody(self, partition: PartitionId) -> StoreError:
        """Make the error for a caller that waited in vain for a leader."""
        leader = self.leader_of(partition)
        if leader is None:
            return Unavailable(f"partition {partition} has no leader")
        return Unavailable(f"partition {partition}: its leader {leader} cannot be reached, or does not serve yet")
