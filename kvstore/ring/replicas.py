"""Steps of moving replicas between servers. Each takes a ring and returns the next version, or the same ring if the
step is done already. Decides only; the caller stores the result by compare-and-set.

A newcomer is added first and catches up from a snapshot and the log; only then the replica that it replaces is removed.
So a partition never has fewer replicas than before.
"""

from __future__ import annotations

from dataclasses import replace

from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId


# docs/protocol.md H6
def begin_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId, leaving: ServerId) -> Ring:
    """Add a replica on `newcomer` that replaces the one on `leaving` once it has caught up. Raises ValueError if there
    is no replica on `leaving`, or one on `newcomer` already."""
    member = _member(ring, partition)
    if (newcomer, leaving) in member.replacing:
        return ring
    if leaving not in member.replicas or newcomer in member.replicas:
        where = ", ".join(member.replicas)
        raise ValueError(
            f"partition {partition}: expected a replica on {where} to move to another server, got {newcomer}"
        )
    if leaving in {server for pair in member.replacing for server in pair}:
        raise ValueError(f"partition {partition}: the replica on {leaving} is being replaced or is itself a newcomer")
    replicas, replacing = (*member.replicas, newcomer), (*member.replacing, (newcomer, leaving))
    return _with(ring, replace(member, replicas=replicas, replacing=replacing))


def finish_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId) -> Ring:
    """Let the newcomer, which has caught up, take the place of the replica that it replaces, also as preferred
    leader."""
    member = ring.partitions.get(partition)
    leaving = _replaced_by(member, newcomer)
    if member is None or leaving is None:
        return ring
    others = [newcomer if each == leaving else each for each in member.replicas if each != newcomer]
    return _with(ring, _without_pair(member, newcomer, tuple(others)))


def give_up_replacing(ring: Ring, partition: PartitionId, newcomer: ServerId) -> Ring:
    """Remove the newcomer, and keep the replica that it was to replace."""
    member = ring.partitions.get(partition)
    if member is None or _replaced_by(member, newcomer) is None:
        return ring
    return _with(ring, _without_pair(member, newcomer, tuple(each for each in member.replicas if each != newcomer)))


def drain(ring: Ring, server: ServerId) -> Ring:
    """Mark the server as one that must hold no replicas."""
    if server in ring.draining:
        return ring
    return replace(ring, version=ring.version + 1, draining=tuple(sorted({*ring.draining, server})))


def undrain(ring: Ring, server: ServerId) -> Ring:
    """Allow the server to hold replicas again. Replicas that have moved away do not return by themselves."""
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
