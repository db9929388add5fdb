"""Chooses the next replica to move so that all servers hold about the same number of replicas. Decides only: an
operator's command performs one move after another. Nothing moves automatically, because a move copies a whole
partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvstore.proto.admin_pb2 import ClusterReport, PartitionView
from kvstore.server.status.health import to_serve


class BalancingMove(NamedTuple):
    """A move of one replica to another server."""

    partition: str
    leaving: str
    newcomer: str


def next_balancing_move(report: ClusterReport) -> BalancingMove | None:
    """Return the next move, or None if no server can take a replica from a server that has at least two more. Skips
    partitions that have replicas which are down or being replaced. A move never increases the number of a
    partition's replicas in one zone. Each move reduces the sum of the squared replica counts, so the sequence of
    moves ends."""
    zones = _takers(report)
    held = held_by(report)
    moves = [
        BalancingMove(partition.id, leaving, newcomer)
        for partition in to_serve(report)
        for leaving in zones
        for newcomer in zones
        if held[leaving] - held[newcomer] >= 2 and _can_move(partition, leaving, newcomer, zones)
    ]
    leaders = {each.id: each.leader for each in report.partitions}

    def cost(move: BalancingMove) -> tuple[int, bool, BalancingMove]:
        """Order moves by the largest difference first. Then prefer replicas that do not lead, because moving a
        leader causes a takeover."""
        return held[move.newcomer] - held[move.leaving], leaders[move.partition] == move.leaving, move

    return min(moves, key=cost, default=None)


def not_considered(report: ClusterReport) -> list[str]:
    """Return the servers that take and give no replica because they do not answer or are not ready, but that may hold
    replicas. A busy server may be among them for a moment."""
    return sorted(
        node.id
        for node in report.nodes
        if node.registered
        and node.id not in report.ring.draining
        and (node.no_answer or ("server" in node.report.roles and node.report.not_ready))
    )


def is_complete(report: ClusterReport) -> bool:
    """Return True if the report considers every server, by the newest ring that one of them knows."""
    newest = max((node.report.ring_version for node in report.nodes if not node.no_answer), default=0)
    return not not_considered(report) and report.ring.version >= newest


def held_by(report: ClusterReport) -> dict[str, int]:
    """Return the number of replicas on each running server that may hold replicas."""
    held = Counter(dict.fromkeys(_takers(report), 0))
    for partition in to_serve(report):
        held.update(each.server for each in partition.replicas if each.server in held and not each.is_leaving)
    return dict(held)


def _takers(report: ClusterReport) -> dict[str, str]:
    """Return the running servers that may hold replicas, with their zones."""
    return {
        node.id: node.report.zone
        for node in report.nodes
        if node.registered
        and not node.no_answer
        and "server" in node.report.roles
        and not node.report.not_ready
        and node.id not in report.ring.draining
    }


def _can_move(partition: PartitionView, leaving: str, newcomer: str, zones: Mapping[str, str]) -> bool:
    servers = [each.server for each in partition.replicas]
    if leaving not in servers or newcomer in servers:
        return False
    if not all(each.is_up and not each.is_joining and not each.is_leaving for each in partition.replicas):
        return False
    others = Counter(zones.get(each, "") for each in servers if each != leaving)
    clashes_before, clashes_after = (others[zones[each]] if zones[each] else 0 for each in (leaving, newcomer))
    return clashes_after <= clashes_before
