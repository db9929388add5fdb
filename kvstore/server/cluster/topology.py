"""A server's view of its cluster: the ring, the leaders, the running servers. Immutable values and the bytes of their
znodes. Decides only."""

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
    """A running server, as registered in its znode `/servers/<id>`."""

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
    """The highest cluster version that it supports. Servers of the first release do not state it (docs/protocol.md
    V1)."""
    starting: bool = False
    """True while it starts: its version does not count for a rise yet."""
    nonce: str = ""
    """A random value of its process that distinguishes restarts."""
    draining: bool = False
    """True if it hosts no replicas until it is started again."""

    def encode(self) -> bytes:
        return orjson.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes) -> Member:
        """Decode a registration. Raises UndecodableNode for an unknown format, by number, and for anything else."""
        return codec.decode(Member, data, what="server znode", format=FORMAT)


@dataclass(frozen=True, slots=True)
class ClusterTopology:
    """One state of the cluster as this server has seen it. A change creates a new instance."""

    ring: Ring
    leaders: Mapping[PartitionId, tuple[ServerId, int]] = field(default_factory=dict)
    """Leader, and the epoch that it had seen when it claimed leadership. Partitions without a leader are absent."""
    servers: Mapping[ServerId, Member] = field(default_factory=dict)

    def with_leader(self, partition: PartitionId, leader: tuple[ServerId, int] | None) -> ClusterTopology:
        """Return the topology with another leader of one partition, or none."""
        leaders = {each: found for each, found in self.leaders.items() if each != partition}
        if leader is not None:
            leaders[partition] = leader
        return replace(self, leaders=leaders)

    def leader_of(self, partition: PartitionId) -> ServerId | None:
        """Return the partition's leader, or None if none is known."""
        found = self.leaders.get(partition)
        return None if found is None else found[0]

    def is_led_by(self, server: ServerId, partition: PartitionId) -> bool:
        return self.leader_of(partition) == server

    def may_answer(self, partition: PartitionId, key: bytes, ring_version: int) -> bool:
        """Return True if the partition may answer for the key to a sender with another ring version (docs/protocol.md
        M16)."""
        member = self.ring.partitions.get(partition)
        return member is not None and ring_version >= member.owned_at and self.ring.partition_of(key) == partition

    def not_leader(self, partition: PartitionId) -> NotLeader:
        """Return the error for a client of the wrong server. It names the leader and its address."""
        leader = self.leader_of(partition)
        if leader is None:
            return NotLeader(partition)
        member = self.servers.get(leader)
        return NotLeader(partition, leader, member.grpc if member else "")

    def no_leader(self, partition: PartitionId) -> StoreError:
        """Return the error for a client that waited in vain for a leader."""
        leader = self.leader_of(partition)
        if leader is None:
            return Unavailable(f"partition {partition} has no leader")
        return Unavailable(f"partition {partition}: its leader {leader} is unreachable or does not serve yet")
