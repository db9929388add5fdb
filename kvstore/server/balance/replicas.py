"""Evens out the replicas between servers, and moves replicas off disks that fill up much faster than others. Decides
only."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.server.balance.judge import Judge, Verdict, threshold
from kvstore.server.balance.observation import Observation
from kvstore.server.balance.step import Goal, Step
from kvstore.server.placement.balancing import BalancingMove, Placed, even_move, may_move
from kvstore.types import PartitionId, ServerId

DISK_HIGH = 0.75
"""Part of a disk above which replicas move off it ..."""
DISK_GAP = 0.2
"""... to a server whose disk is fuller by this much less, also after the move."""
DISK_VETO = 0.1
"""Replicas do not move to a disk that is fuller by this much, whatever their number. If the disk would be above
DISK_HIGH, this holds after the move too. It is less than DISK_GAP, so that moves because of disks and because of
numbers do not undo each other."""


def find(seen: Observation, judge: Judge) -> Verdict:
    """Return the replica to move."""
    placed = _placed(seen)
    held = {server: sum(server in each.servers for each in placed) for server in seen.servers}
    step = _by_disk(seen, judge, placed, held) or _by_count(seen, judge, placed, held)
    if step is not None:
        return Verdict(step, str(step))
    least, most = min(held.values(), default=0), max(held.values(), default=0)
    if most - least < 2:
        return Verdict(None, "all servers hold about the same number of replicas, and no disk fills up before others")
    return Verdict(None, f"servers hold {least} to {most} replicas; zones, disks or recent moves forbid the others")


def _placed(seen: Observation) -> list[Placed]:
    return [
        Placed(
            partition,
            seen.ring.partitions[partition].replicas,
            seen.expected.get(partition, ""),
            not seen.ring.partitions[partition].replacing
            and not any((partition, each) in seen.unfit for each in seen.ring.partitions[partition].replicas),
        )
        for partition in seen.serving
    ]


def _by_count(seen: Observation, judge: Judge, placed: list[Placed], held: Mapping[ServerId, int]) -> Step | None:
    zones: dict[str, str] = {server: state.zone for server, state in seen.servers.items()}
    sizes = _Sizes(seen, placed)

    def step_of(move: BalancingMove) -> Step:
        reason = (
            f"{move.leaving} holds {held[ServerId(move.leaving)]} replicas and {move.newcomer} holds "
            f"{held[ServerId(move.newcomer)]}"
        )
        return Step(
            goal=Goal.REPLICAS, partition=move.partition, source=move.leaving, target=move.newcomer, reason=reason
        )

    def may(move: BalancingMove) -> bool:
        return _keeps_disk(seen, sizes, move) and _keeps_load(seen, move) and judge.allows(step_of(move))

    move = even_move(zones, placed, may)
    return step_of(move) if move is not None else None


def _keeps_disk(seen: Observation, sizes: _Sizes, move: BalancingMove) -> bool:
    """Return True if the newcomer's disk is not much fuller than the other one, and does not become too full."""
    leaving, newcomer = ServerId(move.leaving), ServerId(move.newcomer)
    before, after = seen.servers[leaving], seen.servers[newcomer]
    moved = sizes.of(PartitionId(move.partition), leaving)
    filled = after.used + moved / after.disk_total if after.disk_total else 0.0
    emptied = before.used - moved / before.disk_total if before.disk_total else 0.0
    return after.used <= before.used + DISK_VETO and (filled < DISK_HIGH or filled <= emptied + DISK_VETO)


class _Sizes:
    """Estimates of the bytes of replicas."""

    def __init__(self, seen: Observation, placed: list[Placed]) -> None:
        self._seen = seen
        self._held = dict.fromkeys(seen.servers, 0)
        """The number of replicas of each server."""
        self._keys = dict.fromkeys(seen.servers, 0)
        """The number of keys in the replicas of each server."""
        for each in placed:
            for server in self._held.keys() & {ServerId(name) for name in each.servers}:
                self._held[server] += 1
                self._keys[server] += seen.keys.get(PartitionId(each.partition), 0)

    def of(self, partition: PartitionId, server: ServerId) -> float:
        """Return the replica's part of the keys on the server's disk, or its part of the replicas if that is more. Both
        are mostly too much, because the disk also holds other data."""
        keys = self._keys[server]
        part = self._seen.keys.get(partition, 0) / keys if keys else 0.0
        return self._seen.servers[server].disk_used * max(part, 1 / self._held[server])


def _keeps_load(seen: Observation, move: BalancingMove) -> bool:
    """Return True if the replica does not lead, or if the server that gets the lead with it is not overloaded then."""
    partition, newcomer = PartitionId(move.partition), ServerId(move.newcomer)
    if seen.expected.get(partition) != move.leaving:
        return True
    is_only_one = len(seen.ring.partitions[partition].replicas) == 1
    return is_only_one and seen.works[newcomer] + seen.work(partition) <= threshold(seen.mean)


def _by_disk(seen: Observation, judge: Judge, placed: list[Placed], held: Mapping[ServerId, int]) -> Step | None:
    """Return a replica to move off the fullest disk."""
    zones: dict[str, str] = {server: state.zone for server, state in seen.servers.items()}
    found: list[tuple[float, Step]] = []
    sizes = _Sizes(seen, placed)
    for leaving, full in sorted(seen.servers.items()):
        if full.used < DISK_HIGH:
            continue
        for each in (each for each in placed if leaving in each.servers):
            partition = PartitionId(each.partition)
            if not each.is_complete or seen.expected.get(partition) == leaving or not seen.keys.get(partition):
                continue
            moved = sizes.of(partition, leaving)
            for newcomer, empty in sorted(seen.servers.items()):
                if not empty.disk_total or held[newcomer] > held[leaving]:
                    continue
                after = empty.used + moved / empty.disk_total
                gap = full.used - moved / full.disk_total - after
                if full.used - empty.used < DISK_GAP or gap < 0 or not may_move(each, leaving, newcomer, zones):
                    continue
                reason = f"the disk of {leaving} is {full.used:.0%} full and that of {newcomer} {empty.used:.0%}"
                step = Step(goal=Goal.REPLICAS, partition=partition, source=leaving, target=newcomer, reason=reason)
                if judge.allows(step):
                    found.append((full.used - empty.used, step))
    return max(found, key=lambda each: (each[0], each[1].partition, each[1].target), default=(0.0, None))[1]
