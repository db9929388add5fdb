"""Decides where replicas go: off servers that are drained or gone, onto those with the fewest, in zones that have none.
Decides only; steward.py performs what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from kvstore.ring.placement import replacement
from kvstore.ring.replicas import begin_replacing, finish_replacing, give_up_replacing, undrain
from kvstore.ring.ring import Member, PartitionState, Ring
from kvstore.types import PartitionId, ServerId

COMING_MAX = 2
"""Newcomers on one server at once: each may have a whole partition to install."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Let a newcomer catch up in order to replace a replica."""

    partition: PartitionId
    newcomer: ServerId
    leaving: ServerId

    def step(self, ring: Ring) -> Ring:
        return begin_replacing(ring, self.partition, self.newcomer, self.leaving)


@dataclass(frozen=True, slots=True)
class Finish:
    """The newcomer has caught up."""

    partition: PartitionId
    newcomer: ServerId

    def step(self, ring: Ring) -> Ring:
        return finish_replacing(ring, self.partition, self.newcomer)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The newcomer has gone before it had caught up, or cannot do what the cluster does, or gets no further while
    another server could take its place."""

    partition: PartitionId
    newcomer: ServerId

    def step(self, ring: Ring) -> Ring:
        return give_up_replacing(ring, self.partition, self.newcomer)


@dataclass(frozen=True, slots=True)
class Forget:
    """A drained server that holds nothing has left for good: the ring need not name it."""

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
    """Decide on the changes that are due now. `alive` maps each server that is up to its zone; `gone` are those that
    have been away for too long; `caught_up` the newcomers that have what their leader has; `unfit` are up, and cannot
    do what the cluster does: they get no replicas, and keep those that they have; `stuck` are newcomers that get no
    further; `resting` servers get replicas only where no other can."""
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
                and replaced in unwanted  # the steward does not begin anew what an operator asked for
                and _choose(awake, member, replaced, alive, held) is not None
            ):
                changes.append(GiveUp(partition, newcomer))
        # One at a time: each of them may become the leader.
        leaving = next(_leaving(member, unwanted), None) if not member.replacing else None
        if leaving is None:
            continue
        newcomer_or_none = _choose(awake, member, leaving, alive, held) or _choose(free, member, leaving, alive, held)
        # The best one, or none for now: a second best would not be moved again.
        if newcomer_or_none is not None and coming[newcomer_or_none] < COMING_MAX:
            changes.append(Begin(partition, newcomer_or_none, leaving))
            held[newcomer_or_none] += 1
            coming[newcomer_or_none] += 1
    changes += [Forget(each) for each in ring.draining if each in gone and not held[each] and not coming[each]]
    return changes


def homeless(ring: Ring, alive: Mapping[ServerId, str], server: ServerId) -> list[PartitionId]:
    """The partitions whose replica on `server` has nowhere to go: every server that may hold one has one."""
    may_hold = set(alive) - set(ring.draining) - {server}
    return [
        member.id
        for member in ring.partitions.values()
        if server in member.replicas
        and member.state is not PartitionState.RETIRED
        and not may_hold - set(member.replicas)
        and server not in {leaving for _, leaving in member.replacing}
    ]


def replicas_held(ring: Ring) -> Counter[ServerId]:
    """How many replicas the ring places on each server. A partition that has retired has none, whatever the ring still
    names: else a server that is gone would be missed until no pin holds that partition's log."""
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
    """The zones of the replicas that are there, so that a newcomer goes to another one."""
    return {server: alive[server] for server in member.replicas if server in alive}
