"""Chooses the next replica to move so that all servers hold about the same number of replicas. Decides only: an
operator's command performs one move after another, and the balancer (kvstore/server/balance) asks for one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvstore.proto.admin_pb2 import ClusterReport, PartitionView
from kvstore.ring.placement import may_replace
from kvstore.server.status.health import to_serve
from kvstore.types import ServerId


class BalancingMove(NamedTuple):
    """A move of one replica to another server."""

    partition: str
    leaving: str
    newcomer: str


class Placed(NamedTuple):
    """The replicas of one partition."""

    partition: str
    servers: Sequence[str]
    leader: str
    is_complete: bool
    """True if all replicas are up and none is being replaced."""


def next_balancing_move(report: ClusterReport) -> BalancingMove | None:
    """Return the next move according to `even_move`, or None if there is none."""
    return even_move(takers(report), [_placed(each) for each in to_serve(report)])


def even_move(
    zones: Mapping[str, str], placed: Sequence[Placed], may: Callable[[BalancingMove], bool] = lambda _: True
) -> BalancingMove | None:
    """Return the next move, or None if no server can take a replica from a server that has at least two more. `zones`
    maps the servers that may hold replicas to their zones. Skips partitions whose replicas are not whole, and moves
    that `may` forbids. A move keeps a partition's replicas on distinct machines, and never increases their number in
    one zone. Each move reduces the sum of the squared replica counts, so the sequence of moves ends."""
    held = _held(zones, placed)
    moves = [
        move
        for each in placed
        for leaving in zones
        for newcomer in zones
        if held[leaving] - held[newcomer] >= 2
        and each.is_complete
        and leaving in each.servers
        and may_move(each, leaving, newcomer, zones)
        and may(move := BalancingMove(each.partition, leaving, newcomer))
    ]
    leaders = {each.partition: each.leader for each in placed}

    def cost(move: BalancingMove) -> tuple[int, bool, BalancingMove]:
        """Order moves by the largest difference first. Then prefer replicas that do not lead, because moving a
        leader causes a takeover."""
        return held[move.newcomer] - held[move.leaving], leaders[move.partition] == move.leaving, move

    return min(moves, key=cost, default=None)


def may_move(placed: Placed, leaving: str, newcomer: str, zones: Mapping[str, str]) -> bool:
    """Return True if the partition's replicas are on distinct machines after the move, and no more of them are in one
    zone than before."""
    if not may_replace(ServerId(newcomer), ServerId(leaving), [ServerId(each) for each in placed.servers]):
        return False
    others = Counter(zones.get(each, "") for each in placed.servers if each != leaving)
    before, after = (others[zones[each]] if zones[each] else 0 for each in (leaving, newcomer))
    return after <= before


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
    return dict(_held(takers(report), [_placed(each) for each in to_serve(report)]))


def _held(zones: Mapping[str, str], placed: Sequence[Placed]) -> Counter[str]:
    held = Counter(dict.fromkeys(zones, 0))
    for each in placed:
        held.update(server for server in each.servers if server in held)
    return held


def takers(report: ClusterReport) -> dict[str, str]:
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


def _placed(partition: PartitionView) -> Placed:
    """Return where the partition's replicas are. A replica that is about to leave no longer counts."""
    replicas = partition.replicas
    return Placed(
        partition.id,
        [each.server for each in replicas if not each.is_leaving],
        partition.leader,
        all(each.is_up and not each.is_joining and not each.is_leaving for each in replicas),
    )
