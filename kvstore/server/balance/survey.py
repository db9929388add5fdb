"""Turns a report on the cluster into the balancer's observation, with the reasons to leave the cluster alone. Decides
only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.ring import PartitionState, Ring
from kvstore.server.balance.observation import Observation, ServerState
from kvstore.server.load.load import PartitionLoad
from kvstore.server.placement.balancing import not_considered, takers
from kvstore.server.status.health import to_serve
from kvstore.types import PartitionId, ServerId

HARMLESS = frozenset(("certificate_expires", "certificate_unusable", "user_like_node", "disk_scarce"))
"""Findings that do not stop the balancer. A step may even help against a scarce disk. Every other finding stops it,
also one that a later release adds."""
CLOSE_BEHIND = 1_000
"""Mutations that a replica may be behind its leader and still get the lead."""
SHOWN_MAX = 3


def observation_of(report: ClusterReport, ring: Ring, loads: Mapping[PartitionId, PartitionLoad]) -> Observation:
    """Return the observation. `ring` is the ring that the answering server knows."""
    zones = takers(report)
    servers = {}
    for node in report.nodes:
        if node.id in zones and not node.report.draining:
            disk = node.report.disk
            servers[ServerId(node.id)] = ServerState(
                zone=node.report.zone, disk_used=disk.total_bytes - disk.free_bytes, disk_total=disk.total_bytes
            )
    unfit = {
        (PartitionId(partition.id), ServerId(replica.server))
        for partition in report.partitions
        for replica in partition.replicas
        if not replica.is_up or replica.failure or replica.is_in_doubt or replica.behind > CLOSE_BEHIND
    }
    return Observation(
        ring=ring,
        servers=servers,
        leaders={PartitionId(each.id): ServerId(each.leader) for each in report.partitions if each.served},
        loads=loads,
        keys={PartitionId(each.id): each.keys for each in report.partitions},
        unfit=frozenset(unfit),
        obstacles=tuple(_obstacles(report, ring, loads)),
    )


def _obstacles(report: ClusterReport, ring: Ring, loads: Mapping[PartitionId, PartitionLoad]) -> Iterator[str]:
    if found := list(dict.fromkeys(each.subject for each in report.findings if each.code not in HARMLESS)):
        yield f"the cluster is not healthy: see the findings about {', '.join(found[:SHOWN_MAX])}"
    if ring.version != report.ring.version:
        yield f"the ring changed from version {report.ring.version} to {ring.version} during the survey"
    if ring.pace.paused:
        yield "moves are paused; `kvstore ring resume` continues them"
    if ring.moves:
        yield f"{len(ring.moves)} moves of ranges are open"
    members = ring.partitions.values()
    if replacing := sorted(each.id for each in members if each.replacing):
        yield f"replicas of {', '.join(replacing[:SHOWN_MAX])} are being replaced"
    if changing := sorted(each.id for each in members if each.state is not PartitionState.SERVING):
        yield f"partitions join or leave: {', '.join(changing[:SHOWN_MAX])}"
    if draining := [each for each in ring.draining if any(each in member.replicas for member in members)]:
        yield f"{', '.join(draining)} is being drained"
    releases = {node.report.version for node in report.nodes if node.registered and node.report.version}
    if len(releases) > 1:
        yield f"the nodes run different releases: {', '.join(sorted(releases))}"
    if silent := not_considered(report):
        yield f"{', '.join(silent[:SHOWN_MAX])} does not answer or is not ready"
    if unknown := sorted(each.id for each in to_serve(report) if each.id not in loads):
        yield f"the leaders of {', '.join(unknown[:SHOWN_MAX])} do not report their load"
