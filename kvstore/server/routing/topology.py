"""A server's knowledge of its cluster: the ring, who leads, who is up. Immutable values, and their znodes' bytes.

Decides only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import orjson

from kvstore import versions
from kvstore.errors import NotLeader, StoreError, Unavailable, UndecodableNode
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
    """Of the software."""
    can: int = versions.FIRST
    """The highest cluster version that it can do; servers of the first release do not say it (docs/protocol.md V1)."""
    starting: bool = False
    """It is not up yet: what it can do does not count for a rise."""
    nonce: str = ""
    """Of the process: tells a restarted one from the one before."""
    draining: bool = False
    """It hosts no replicas until it is started again."""

    def encode(self) -> bytes:
        return orjson.dumps({"format": FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes) -> Member:
        """Raises UndecodableNode for an unknown format, by number, and for anything that is not a member."""
        try:
            document = orjson.loads(data)
            if document.pop("format") != FORMAT:
                raise UndecodableNode(f"server znode: want format {FORMAT}, got {orjson.loads(data)['format']}")
            known = {name: document[name] for name in Member.__slots__ if name in document}
            return Member(**{**known, "roles": tuple(document.get("roles", ()))})
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UndecodableNode(f"server znode: {error!r}") from error


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

    def is_led_by(self, server: ServerId, partition: PartitionId) -> bool:
        leader = self.leaders.get(partition)
        return leader is not None and leader[0] == server

    def may_answer(self, partition: PartitionId, key: bytes, ring_version: int) -> bool:
        """Whether the partition may answer for the key to somebody who goes by another version of the ring
        (docs/protocol.md M16)."""
        member = self.ring.partitions.get(partition)
        return member is not None and ring_version >= member.owned_at and self.ring.partition_of(key) == partition

    def not_leader(self, partition: PartitionId) -> NotLeader:
        """Make the error for a caller of the wrong server: it names the leader and its address."""
        leader = self.leaders.get(partition)
        if leader is None:
            return NotLeader(partition)
        member = self.servers.get(leader[0])
        return NotLeader(partition, leader[0], member.grpc if member else "")

    def nobody(self, partition: PartitionId) -> StoreError:
        """Make the error for a caller that waited in vain for a leader."""
        leader = self.leaders.get(partition)
        if leader is None:
            return Unavailable(f"partition {partition} has no leader")
        return Unavailable(f"partition {partition}: its leader {leader[0]} cannot be reached, or does not serve yet")
