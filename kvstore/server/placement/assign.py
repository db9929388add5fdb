"""Decides where replicas are placed: off drained and lost servers, onto servers with few replicas, and into zones
that have no replica of the partition. Decides only; steward.py performs the changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from kvstore.ring.placement import may_replace, replacement
from kvstore.ring.replicas import begin_replacing, finish_replacing, give_up_replacing, undrain
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId

COMING_MAX = 2
"""Maximum number of newcomers on one server at a time, because each may have to install a whole partition."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Ring change that lets a newcomer catch up so that it can replace a replica."""

    partition: PartitionId
    newcomer: ServerId
    leaving: ServerId

    def step(self, ring: Ring) -> Ring:
        return begin_replacing(ring, self.partition, self.newcomer, self.leaving)


@dataclass(frozen=True, slots=True)
class Finish:
    """Ring change that completes a replacement after the newcomer has caught up."""

    partition: PartitionId
    newcomer: ServerId

    def step(self, ring: Ring) -> Ring:
        return finish_replacing(ring, self.partition, self.newcomer)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Ring change that cancels a replacement: the newcomer was lost before it caught up, does not support the cluster
    version, or makes no progress while another server could take its place."""

    partition: PartitionId
    newcomer: ServerId

    def step(self, ring: Ring) -> Ring:
        return give_up_replacing(ring, self.partition, self.newcomer)


@dataclass(frozen=True, slots=True)
class Forget:
    """Ring change that removes a drained server without replicas: the server has left permanently."""

    server: ServerId

    def step(self, ring: Ring) -> Ring:
        return undrain(ring, self.server)


Change = Begin | Finish | GiveUp | Forget


def decide(
    ring: Ring,
    alive: Mapping[ServerId, str],
    gone: Set[ServerId],
    caught_up: Set[tuple[PartitionId, ServerId]],
    unfit: Set[ServerId] = frozenset(),
    stuck: Set[tuple[PartitionId, ServerId]] = frozenset(),
    resting: Set[ServerId] = frozenset(),
) -> list[Change]:
    """Return the changes that are due now. `alive` maps each running server to its zone, `gone` are servers that have
    been absent for too long, and `caught_up` are newcomers that have all of their leader's state. `unfit` servers run
    but do not support the cluster version: they keep their replicas and get no new ones. `stuck` are newcomers without
    progress. `resting` servers get replicas only if no other server can."""
    changes: list[Change] = []
    held = replicas_held(ring)
    coming = Counter(newcomer for member in ring.partitions.values() for newcomer, _ in member.replacing)
    free = {each: zone for each, zone in alive.items() if each not in ring.draining}
    awake = {each: zone for each, zone in free.items() if each not in resting}
    unwanted = gone | set(ring.draining)
    for partition in sorted(ring.partitions):
        member = ring.partitions[partition]
        if member.state is PartitionState.RETIRED:
            continue
        for newcomer, replaced in member.replacing:
            is_of_no_use = newcomer in gone or newcomer in unfit or newcomer in ring.draining
            if (partition, newcomer) in caught_up:
                changes.append(Finish(partition, newcomer))
            elif is_of_no_use or (
                (partition, newcomer) in stuck
                and replaced in unwanted  # the steward would not restart what an operator requested
                and _choose(awake, member, replaced, alive, held) is not None
            ):
                changes.append(GiveUp(partition, newcomer))
        # One at a time, because each newcomer may become the leader.
        leaving = next(_leaving(member, unwanted), None) if not member.replacing else None
        if leaving is None:
            continue
        newcomer_or_none = _choose(awake, member, leaving, alive, held) or _choose(free, member, leaving, alive, held)
        # The best one, or none for now: a second-best choice would not be moved again.
        if newcomer_or_none is not None and coming[newcomer_or_none] < COMING_MAX:
            changes.append(Begin(partition, newcomer_or_none, leaving))
            held[newcomer_or_none] += 1
            coming[newcomer_or_none] += 1
    changes += [Forget(each) for each in ring.draining if each in gone and not held[each] and not coming[each]]
    return changes


def homeless(ring: Ring, alive: Mapping[ServerId, str], server: ServerId) -> list[PartitionId]:
    """Return the partitions whose replica on `server` cannot be moved, because every eligible server or another process
    of its machine already has a replica."""
    may_hold = set(alive) - set(ring.draining) - {server}
    return [
        member.id
        for member in ring.partitions.values()
        if server in member.replicas
        and member.state is not PartitionState.RETIRED
        and not any(may_replace(each, server, member.replicas) for each in may_hold)
        and server not in {leaving for _, leaving in member.replacing}
    ]


def replicas_held(ring: Ring) -> Counter[ServerId]:
    """Return the number of replicas that the ring places on each server. The replicas of retired partitions do not
    count. Otherwise a lost server would be missed until no pin holds the log of the partition."""
    members = ring.partitions.values()
    return Counter(server for each in members if each.state is not PartitionState.RETIRED for server in each.replicas)


def _leaving(member: Member, unwanted: Set[ServerId]) -> Iterator[ServerId]:
    return (server for server in member.replicas if server in unwanted)


def _choose(
    servers: Mapping[ServerId, str],
    member: Member,
    leaving: ServerId,
    alive: Mapping[ServerId, str],
    held: Mapping[ServerId, int],
) -> ServerId | None:
    return replacement({**servers, **_zones(member, alive)}, member, leaving, held)


def _zones(member: Member, alive: Mapping[ServerId, str]) -> dict[ServerId, str]:
    """Return the zones of the running replicas, because a newcomer should be placed in another zone."""
    return {server: alive[server] for server in member.replicas if server in alive}
