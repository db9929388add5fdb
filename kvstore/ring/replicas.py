"""Steps of moving replicas and leads between servers. Each step takes a ring and returns the next version, or the same
ring if the step is already done. Decides only; the caller stores the result by compare-and-set.

The new replica is added first and catches up from a snapshot and the log. Only then is the old replica removed, so a
partition never has fewer replicas than before.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.ring.placement import may_replace
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId


# docs/protocol.md H6
def begin_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId, leaving: ServerId) -> Ring:
    """Add a replica on `newcomer`, which replaces the replica on `leaving` once it has caught up. Raises ValueError if
    `leaving` has no replica of the partition or is already part of a replacement, or if `newcomer` or another process
    of its machine already has a replica."""
    member = _member(ring, partition)
    if (newcomer, leaving) in member.replacing:
        return ring
    if leaving not in member.replicas or not may_replace(newcomer, leaving, member.replicas):
        where = ", ".join(member.replicas)
        raise ValueError(
            f"partition {partition}: expected a replica on {where} to move to a server on another machine, got "
            f"{newcomer}"
        )
    if leaving in {server for pair in member.replacing for server in pair}:
        raise ValueError(f"partition {partition}: the replica on {leaving} is being replaced or is itself a newcomer")
    replicas, replacing = (*member.replicas, newcomer), (*member.replacing, (newcomer, leaving))
    return _with(ring, replace(member, replicas=replicas, replacing=replacing))


def finish_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId) -> Ring:
    """Remove the replica that the caught-up `newcomer` replaces. The newcomer takes over its place in the order of
    preferred leaders."""
    member = ring.partitions.get(partition)
    leaving = _replaced_by(member, newcomer)
    if member is None or leaving is None:
        return ring
    others = [newcomer if each == leaving else each for each in member.replicas if each != newcomer]
    return _with(ring, _without_pair(member, newcomer, tuple(others)))


def give_up_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId) -> Ring:
    """Remove the replica on `newcomer` and keep the one that it was going to replace."""
    member = ring.partitions.get(partition)
    if member is None or _replaced_by(member, newcomer) is None:
        return ring
    return _with(ring, _without_pair(member, newcomer, tuple(each for each in member.replicas if each != newcomer)))


def prefer_leader(ring: Ring, partition: PartitionId, server: ServerId) -> Ring:
    """Make the replica on `server` the partition's preferred leader. The present leader hands over to it. Raises
    ValueError if `server` has no replica of the partition, or has one that is being replaced or still catches up."""
    member = _member(ring, partition)
    if server not in member.replicas or server in {each for pair in member.replacing for each in pair}:
        named = {each for pair in member.replacing for each in pair}
        able = ", ".join(each for each in member.replicas if each not in named)
        raise ValueError(f"partition {partition}: expected a server with a lasting replica ({able}), got {server}")
    if member.replicas[0] == server:
        return ring
    others = (each for each in member.replicas if each != server)
    return _with(ring, replace(member, replicas=(server, *others)))


def drain(ring: Ring, server: ServerId) -> Ring:
    """Mark the server as draining: its replicas move to other servers, and it receives no new ones."""
    if server in ring.draining:
        return ring
    return replace(ring, version=ring.version + 1, draining=tuple(sorted({*ring.draining, server})))


def undrain(ring: Ring, server: ServerId) -> Ring:
    """Allow the server to hold replicas again. Replicas that have already moved away do not come back on their own."""
    if server not in ring.draining:
        return ring
    return replace(ring, version=ring.version + 1, draining=tuple(each for each in ring.draining if each != server))


def _member(ring: Ring, partition: PartitionId) -> Member:
    member = ring.partitions.get(partition)
    if member is None or member.state is PartitionState.RETIRED:
        raise ValueError(f"expected one of {', '.join(sorted(ring.partitions))}, got {partition}")
    return member


def _replaced_by(member: Member | None, newcomer: ServerId) -> ServerId | None:
    return dict(member.replacing).get(newcomer) if member is not None else None


def _without_pair(member: Member, newcomer: ServerId, replicas: tuple[ServerId, ...]) -> Member:
    replacing = tuple(pair for pair in member.replacing if pair[0] != newcomer)
    return replace(member, replicas=replicas, replacing=replacing)


def _with(ring: Ring, member: Member) -> Ring:
    return replace(ring, version=ring.version + 1, partitions={**ring.partitions, member.id: member})
