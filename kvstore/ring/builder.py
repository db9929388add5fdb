"""Builds whole rings: the first ring of a cluster, and rings of any size for tests. Decides only, deterministically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sortedcontainers import SortedDict

from kvstore.ring.balance import SLICES_MAX, Balance
from kvstore.ring.hashing import TOKENS, KeyHash
from kvstore.ring.placement import place_members
from kvstore.ring.ring import Member, Ring
from kvstore.types import PartitionId, ServerId


def new_ring(partitions: Sequence[PartitionId], servers: Mapping[ServerId, str], replicas: int, hash: KeyHash) -> Ring:
    """Build the first ring of a cluster, with `replicas` replicas for each partition. `servers` maps each server to its
    zone; an empty zone means that the server is in no zone. `hash` is the cluster's key hash for good. Raises
    ValueError if `partitions` is empty, if there are more partitions than the key hash allows, or if the servers are
    on fewer machines than there are replicas."""
    if not partitions:
        raise ValueError("expected at least one partition, got none")
    first, *others = place_members(partitions, servers, replicas)
    step = TOKENS // SLICES_MAX
    tokens = SortedDict({TOKENS - 1 - step * slice_: first.id for slice_ in range(SLICES_MAX)})
    return _joined(Ring(1, {first.id: first}, tokens, hash), others, version=1)


def with_partitions(ring: Ring, members: Sequence[Member]) -> Ring:
    """Return the next version of a ring that contains no data yet. Each of `members` owns its share at once, without
    moves. Raises ValueError if a member is already in the ring."""
    return _joined(ring, members, version=ring.version + 1)


def _joined(ring: Ring, members: Sequence[Member], version: int) -> Ring:
    partitions = dict(ring.partitions)
    balance = Balance(ring.hash, ring.ranges(), partitions)
    for member in members:
        if member.id in partitions:
            raise ValueError(f"partition {member.id} is in the ring already")
        partitions[member.id] = member
        balance.join(member.id)
    return Ring(version, partitions, SortedDict({**ring.tokens, **balance.owners}), ring.hash)
