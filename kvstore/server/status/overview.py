"""Combines one node's own knowledge and the reports of other nodes into a report on the cluster. Decides only.

If two sources disagree, the node concerned is believed: a partition is served if a server reports that it serves it. If
two servers report that, the one with the later epoch is believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.meta.registration import RegisteredBookies
from kvstore.proto import admin_pb2
from kvstore.proto.admin_pb2 import BookieReport, ClusterReport, NodeReport, PartitionView, ReplicaReport
from kvstore.ring import Member, Move, MoveState, PartitionState, Ring
from kvstore.server.cluster import proposal
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.status import health
from kvstore.types import BookieId, Quorum, ServerId

SERVING = "serving"
"""Role of a replica that leads and answers."""
STUCK_S = 20.0
"""Time after which a failing move counts as stuck. A change of leader at either end takes less."""


@dataclass(frozen=True, kw_only=True)
class ClusterSurvey:
    """The knowledge that one node has of its cluster at one moment."""

    server: ServerId
    topology: ClusterTopology
    reports: Mapping[ServerId, NodeReport]
    """The reports of the nodes that answered, including this node. A report without `metadata` shows only that the
    node is up."""
    silence: Mapping[ServerId, str] = field(default_factory=dict)
    """The reason why each of the other nodes did not answer."""
    bookies: RegisteredBookies = field(default_factory=lambda: RegisteredBookies({}, {}))
    known_bookies: Iterable[BookieId] = ()
    """All bookies that are known to have a cookie, whether they run or not."""
    spaces: Mapping[BookieId, tuple[int, int] | str] = field(default_factory=dict)
    """For each bookie that was asked directly: its total and free bytes, or the reason why it did not answer."""
    quorum: Quorum = field(default_factory=lambda: Quorum(3, 3, 2))
    cluster_version: int = 0
    namespaces: Iterable[admin_pb2.Namespace] = ()
    date_ms: int = 0


def report_of_cluster(survey: ClusterSurvey) -> ClusterReport:
    """Return the report with its findings and the summary of its health."""
    own = survey.reports[survey.server]
    report = ClusterReport(
        server=survey.server,
        date_ms=survey.date_ms,
        metadata=own.metadata,
        access_on=own.access_on,
        ensemble_size=survey.quorum.ensemble,
        ack_quorum=survey.quorum.ack,
        cluster_version=survey.cluster_version,
        namespaces=survey.namespaces,
    )
    reports = survey.reports.values()
    if snapshots := [each.snapshot for each in reports if each.HasField("snapshot")]:
        report.snapshot.MergeFrom(min(snapshots, key=lambda snapshot: snapshot.age_s))
    report.snapshot_age_max_s = min((each.snapshot_age_max_s for each in reports if each.snapshot_age_max_s), default=0)
    report.partitions.extend(_partitions(survey))
    report.nodes.extend(_nodes(survey, report.partitions))
    if (copies := _copies(survey.reports.values())) is not None:
        report.copies.MergeFrom(copies)
    report.bookies.extend(_bookies(survey, _lacking_at(report.partitions, report.copies)))
    report.ring.MergeFrom(_ring_view(survey, own.metadata.read_age_s, report.partitions))
    repair = _repair(survey.reports.values())
    if repair is not None:
        report.repair.MergeFrom(repair)
    for each in survey.reports.values():
        if each.HasField("balance"):
            report.balance.CopyFrom(each.balance)
    report.findings.extend(health.findings_of(report))
    report.health.MergeFrom(health.health_of(report, report.findings))
    return report


def servers_of(topology: ClusterTopology) -> list[ServerId]:
    """Return the servers that are registered or should hold a replica, sorted. Retired partitions need no replicas."""
    partitions = topology.ring.partitions.values()
    holding = {replica for each in partitions if each.state is not PartitionState.RETIRED for replica in each.replicas}
    return sorted(holding | set(topology.servers))


def node_of(bookie: BookieId, address: str, topology: ClusterTopology) -> str:
    """Return the server in whose process the bookie runs, or an empty string if none is known. The server is found
    by the bookie's address, or by the bookie's id, which consists of a node's id and an incarnation."""
    for id, member in sorted(topology.servers.items()):
        if address and member.bookie == address:
            return id
    name = bookie.rpartition("-")[0]
    return name if name in servers_of(topology) else ""


def _nodes(survey: ClusterSurvey, partitions: Iterable[PartitionView]) -> list[admin_pb2.NodeView]:
    leads: dict[str, list[str]] = {}
    holds: dict[str, list[str]] = {}
    for partition in partitions:
        if partition.leader:
            leads.setdefault(partition.leader, []).append(partition.id)
        for replica in partition.replicas if partition.state != PartitionState.RETIRED.value else ():
            holds.setdefault(replica.server, []).append(partition.id)
    return [
        admin_pb2.NodeView(
            id=server,
            registered=server in survey.topology.servers,
            no_answer=survey.silence.get(server, ""),
            report=survey.reports.get(server),
            leads=leads.get(server, ()),
            holds=holds.get(server, ()),
        )
        for server in sorted({*servers_of(survey.topology), *survey.reports, *survey.silence})
    ]


def _partitions(survey: ClusterSurvey) -> list[PartitionView]:
    ring = survey.topology.ring
    shares = ring.shares()
    reports: dict[str, dict[ServerId, ReplicaReport]] = {}
    for server, report in survey.reports.items():
        for each in report.replicas:
            reports.setdefault(each.partition, {})[server] = each
    return [_partition(survey, ring.partitions[id], shares[id], reports.get(id, {})) for id in sorted(ring.partitions)]


def _partition(
    survey: ClusterSurvey, member: Member, share: float, reports: Mapping[ServerId, ReplicaReport]
) -> PartitionView:
    leader, epoch = survey.topology.leaders.get(member.id, (ServerId(""), 0))
    serving = [server for server, found in reports.items() if found.role == SERVING]
    if serving:
        leader = max(serving, key=lambda server: (reports[server].lead.epoch, server == leader, server))
    lead = reports.get(leader) if serving else None
    view = PartitionView(
        id=member.id,
        state=member.state.value,
        leader=leader,
        epoch=lead.lead.epoch if lead else max([epoch, *(each.epoch for each in reports.values())]),
        served=lead is not None or _reports_nothing(survey, leader),
        sequence=lead.sequence if lead else max((each.sequence for each in reports.values()), default=0),
        keys=lead.keys if lead else max((each.keys for each in reports.values()), default=0),
        share=share,
        lead=lead.lead if lead else None,
    )
    joining = {newcomer for newcomer, _ in member.replacing}
    leaving = {gone for _, gone in member.replacing}
    for server in member.replicas:
        found = reports.get(server)
        row = view.replicas.add(
            server=server,
            is_up=found is not None or _reports_nothing(survey, server),
            is_joining=server in joining,
            is_leaving=server in leaving,
        )
        if found is None:
            continue
        row.role, row.sequence, row.is_in_doubt = found.role, found.sequence, found.is_in_doubt
        row.failure, row.lead_failure = found.failure, found.lead_failure
        if lead is not None:
            row.behind = max(0, lead.sequence - found.sequence)
    return view


def _reports_nothing(survey: ClusterSurvey, server: ServerId) -> bool:
    """Return True if the server is up but runs a release that reports nothing. Then the information of other servers
    is used."""
    report = survey.reports.get(server)
    return report is not None and not report.HasField("metadata")


def _bookies(survey: ClusterSurvey, lacking: Mapping[str, int]) -> list[BookieReport]:
    """Return the bookies that are registered, have a cookie, or are reported by their nodes."""
    reported = {
        BookieId(report.bookie.id): report.bookie for report in survey.reports.values() if report.HasField("bookie")
    }
    registered = survey.bookies.all
    found = []
    for bookie in sorted({*survey.known_bookies, *registered, *reported, *map(BookieId, lacking)}):
        row = BookieReport(id=bookie, address=registered.get(bookie, ""))
        if bookie in reported:
            row.CopyFrom(reported[bookie])
        row.zone = row.zone or survey.bookies.zones.get(bookie, "")
        row.node = row.node or node_of(bookie, row.address, survey.topology)
        row.state = _state(bookie, survey.bookies, is_reported=bookie in reported, state=row.state)
        row.lacking_ledgers = lacking.get(bookie, 0)
        space = survey.spaces.get(bookie)
        if isinstance(space, str):
            row.no_answer = space
        elif space is not None:
            row.disk.total_bytes, row.disk.free_bytes = space
        elif bookie not in reported and row.node in survey.silence:
            row.no_answer = survey.silence[ServerId(row.node)]
        found.append(row)
    return found


def _state(bookie: BookieId, registered: RegisteredBookies, *, is_reported: bool, state: str) -> str:
    """Return the state of a bookie. Its own report on its space is believed. But without a registration it counts as
    away, because clients cannot find it."""
    if bookie in registered.readonly:
        return "readonly"
    if bookie in registered.writable:
        return state if is_reported else "writable"
    return "away"


def _ring_view(survey: ClusterSurvey, age_s: float, partitions: Iterable[PartitionView]) -> admin_pb2.RingView:
    ring: Ring = survey.topology.ring
    reported = {each.id: each for report in survey.reports.values() for each in report.copied}
    copied = {id: each.part for id, each in reported.items()}
    unserved = {each.id for each in partitions if not each.served}
    done, left_s = proposal.eta_s(ring, survey.date_ms, {move: copied.get(move, 0.0) for move in ring.moves})
    view = admin_pb2.RingView(
        version=ring.version,
        age_s=age_s,
        paused=ring.pace.paused,
        moves_planned=ring.journey.moves,
        moves_done=max(0, ring.journey.moves - len(ring.moves)),
        progress=done,
        eta_s=left_s,
        draining=ring.draining,
        hash=ring.hash.name,
    )
    for move in ring.moves.values():
        progress = reported.get(move.id)
        view.moves.add(
            id=move.id,
            source=move.source,
            target=move.target,
            first=proposal.move_status(move).first,
            last=move.end,
            state=move.state.value,
            attempt=move.attempt,
            copied=1.0 if move.state is MoveState.FLIPPED else copied.get(move.id),
            stuck="" if ring.pace.paused else _why_stuck(move, progress, unserved),
            eta_s=progress.eta_s if progress is not None and progress.HasField("eta_s") else None,
        )
    return view


def _why_stuck(move: Move, progress: admin_pb2.MoveCopied | None, unserved: Collection[str]) -> str:
    """Return the reason why the move makes no progress, or an empty string if it makes progress or waits for other
    moves."""
    for role, partition in (("target", move.target), ("source", move.source)):
        if partition in unserved:
            return f"partition {partition}, its {role}, is not served"
    if progress is not None and progress.failing_s >= STUCK_S:
        return f"no step has succeeded for {progress.failing_s:.0f} s: {progress.failure}"
    return ""


def _lacking_at(partitions: Iterable[PartitionView], copies: admin_pb2.CopiesReport) -> Mapping[str, int]:
    """Return the number of under-replicated ledgers for each bookie: the number that the leaders report or, if
    higher, the number according to the count of all ledgers."""
    found: Counter[str] = Counter()
    for partition in partitions:
        for each in partition.lead.lacking_at:
            found[each.bookie] += each.ledgers
    return found | Counter({each.bookie: each.lacking for each in copies.away})


def _copies(reports: Iterable[NodeReport]) -> admin_pb2.CopiesReport | None:
    """Return the latest count of copies, or None if no report contains one."""
    counted = [report.copies for report in reports if report.HasField("copies")]
    return min(counted, key=lambda copies: copies.age_s, default=None)


def _repair(reports: Iterable[NodeReport]) -> admin_pb2.RepairReport | None:
    repairs = [report.repair for report in reports if report.HasField("repair")]
    if not repairs:
        return None
    return admin_pb2.RepairReport(
        enabled=all(each.enabled for each in repairs),
        marked=max(each.marked for each in repairs),
        repairing=sum(each.repairing for each in repairs),
        unreadable=max(each.unreadable for each in repairs),
        repaired=sum(each.repaired for each in repairs),
        copied_bytes=sum(each.copied_bytes for each in repairs),
    )
