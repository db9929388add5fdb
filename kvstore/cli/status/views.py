"""The status of a cluster as a document and as text for people. Decides only: prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from kvstore.cli.output import as_table, shown_prefix
from kvstore.proto.namespaces import KINDS, warning_of
from kvstore.server.status.health import copies_of, retired_in, to_serve
from kvstore.server.status.sizes import count
from kvstore.types import machine_of
from kvstore.versions import release_for

if TYPE_CHECKING:
    from kvstore.proto.admin_pb2 import BookieReport, ClusterReport, DiskReport, Namespace, NodeView, PartitionView

GRADES = ("healthy", "degraded", "down")
"""Indexed by the exit code of `kvstore status`."""
OLD_S = 20.0
"""Seconds above which the age of the knowledge is shown. Nodes re-read everything at least every 12 s."""
FINDINGS_SHOWN_MAX = 20
"""Maximum number of findings that are shown, worst first."""
NAMESPACES_SHOWN_MAX = 5
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
Processes = Sequence[Mapping[str, Any]]
"""The nodes of a local cluster, as LocalCluster.status reports them."""


def status_document(report: ClusterReport, processes: Processes = ()) -> dict[str, Any]:
    """Return the whole status as --json shows it. The nodes' own reports are in `nodes`, under `report`."""
    own = {each["id"]: each for each in processes}
    return {
        "health": {"grade": GRADES[report.health.grade], "text": report.health.text},
        "findings": [
            {
                "grade": GRADES[each.grade],
                "code": each.code,
                "subject": each.subject,
                "reason": each.reason,
                "next_step": each.next_step or None,
            }
            for each in report.findings
        ],
        "server": report.server,
        "date_ms": report.date_ms,
        "nodes": [{**own.get(each.id, {}), **_node(each)} for each in report.nodes],
        "partitions": [partition_document(each) for each in report.partitions],
        "bookies": [bookie_document(each) for each in report.bookies],
        "ring": _plain(report.ring),
        "metadata": _plain(report.metadata),
        "cluster_version": report.cluster_version or None,
        "namespaces": [namespace_document(each) for each in report.namespaces],
        "access_on": report.access_on,
        "copies": {**_plain(report.copies), **copies_of(report)._asdict()},
        "repair": _plain(report.repair) if report.HasField("repair") else None,
        "snapshot": _plain(report.snapshot) if report.HasField("snapshot") else None,
        "balance": _plain(report.balance) if report.HasField("balance") else None,
    }


def status_text(report: ClusterReport, processes: Processes = ()) -> str:
    """Return the status as text: health, nodes, findings with advice, and further facts."""
    parts = [report.health.text, "", as_table(_machine_rows(report, processes))]
    if report.findings:
        parts.append("")
    for each in report.findings[:FINDINGS_SHOWN_MAX]:
        parts.append(f"{'!!' if each.grade > 1 else '! '} {each.subject}: {each.reason} ({each.code})")
        if each.next_step:
            parts.append(f"   -> {each.next_step}")
    if (more := len(report.findings) - FINDINGS_SHOWN_MAX) > 0:
        parts.append(f"… and {more} more (--json shows all)")
    return "\n".join([*parts, "", *_rest(report)])


def dated_line(date_ms: int, text: str) -> str:
    """Return the text after its date, to the second."""
    date = datetime.fromtimestamp(date_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"{date} {text}"


def what_matters(report: ClusterReport) -> tuple[Any, ...]:
    """Return the part of a status whose change is worth a new line, without numbers that change all the time."""
    return report.health.grade, *((each.grade, each.code, each.subject) for each in report.findings)


def partition_document(view: PartitionView) -> dict[str, Any]:
    """Return a partition as its leader and its replicas report it."""
    return {
        "id": view.id,
        "state": view.state,
        "leader": view.leader or None,
        "served": view.served,
        "epoch": view.epoch,
        "sequence": view.sequence,
        "keys": view.keys,
        "share": round(view.share, 6),
        "replicas": [
            {
                "server": each.server,
                "is_up": each.is_up,
                "role": each.role or None,
                "seq": each.sequence if each.role else None,
                "behind": each.behind if each.HasField("behind") else None,
                "failure": each.failure or None,
                "lead_failure": each.lead_failure or None,
                "is_in_doubt": each.is_in_doubt,
            }
            for each in view.replicas
        ],
        "ledgers": view.lead.ledgers if view.HasField("lead") else None,
        "ledgers_lacking_copies": view.lead.ledgers_lacking_copies if view.HasField("lead") else None,
        "trimmed_below_seq": view.lead.trimmed_sequence if view.HasField("lead") else None,
        "ops_per_s": round(view.lead.ops_per_s, 1) if view.HasField("lead") else None,
        "hot_keys": [{"key": hot.key, "share": round(hot.share, 4)} for hot in view.lead.hot_keys],
    }


def bookie_document(bookie: BookieReport) -> dict[str, Any]:
    """Return a bookie as it, its node and its registration report it. Figures that only a server in its process reports
    are None if there is none."""
    has_disk, has_node = bookie.HasField("disk"), bool(bookie.node)
    return {
        "id": bookie.id,
        "address": bookie.address or None,
        "zone": bookie.zone or None,
        "state": bookie.state,
        "no_answer": bookie.no_answer or None,
        "node": bookie.node or None,
        "free_bytes": bookie.disk.free_bytes if has_disk else None,
        "total_bytes": bookie.disk.total_bytes if has_disk else None,
        "reserve_bytes": bookie.disk.reserve_bytes if has_disk else None,
        "directories": [_plain(each) for each in bookie.directories],
        "failed_directories": [each.path for each in bookie.directories if each.failure],
        "stored_ledgers": bookie.ledgers if has_node else None,
        "limbo_ledgers": bookie.limbo_ledgers if has_node else None,
        "lacking_ledgers": bookie.lacking_ledgers,
        "refused_other_entry": bookie.refused_other_entry if has_node else None,
        "damaged_records": bookie.damaged_records if has_node else None,
    }


def namespace_document(space: Namespace) -> dict[str, Any]:
    """Return a namespace as `kvstore namespace` shows it, with the limits that it is near or at."""
    limits = space.limits
    return {
        "name": space.name,
        "prefix": shown_prefix(space.prefix),
        "keys": space.keys,
        "keys_max": limits.keys_max or None,
        "bytes": space.bytes,
        "bytes_max": limits.bytes_max or None,
        "ops_per_s": limits.ops_per_s or None,
        "burst": limits.burst or None,
        "ttl_ms": limits.ttl_ms or None,
        "refused": {kind: space.refused.get(kind, 0) for kind in KINDS},
        "warning": warning_of(space) or None,
    }


def _node(node: NodeView) -> dict[str, Any]:
    report = node.report
    return {
        "id": node.id,
        "registered": node.registered,
        "no_answer": node.no_answer or None,
        "not_ready": list(report.not_ready),
        "version": report.version or None,
        "uptime_s": round(report.uptime_s, 1) if node.HasField("report") else None,
        "zone": report.zone or None,
        "leads": list(node.leads),
        "holds": list(node.holds),
        "report": _plain(report) if node.HasField("report") else None,
    }


def _machine_rows(report: ClusterReport, processes: Processes) -> list[dict[str, Any]]:
    """Return a row for each node, or for each machine if one has several processes."""
    machines: dict[str, list[NodeView]] = {}
    for node in report.nodes:
        machines.setdefault(machine_of(node.id), []).append(node)
    if len(machines) == len(report.nodes):
        return [_node_row(each, report, processes) for each in report.nodes]
    return [_machine_row(machine, nodes, report) for machine, nodes in machines.items()]


def _machine_row(machine: str, nodes: Sequence[NodeView], report: ClusterReport) -> dict[str, Any]:
    """Return a row with the processes' worst state, the shortest time since a start, the least free space, and the sums
    of their partitions."""
    rows = [_node_row(each, report, ()) for each in nodes]
    reported = [each.report for each in nodes if each.HasField("report")]
    worst = max((_state(each) for each in nodes), key=STATES.index)
    named = [each.id for each in nodes if _state(each) == worst]
    disk = min((each.disk for each in reported), key=lambda disk: disk.free_bytes, default=None)
    return {
        "node": machine,
        "processes": len(nodes),
        "state": worst if len(named) == len(nodes) else f"{worst}: {', '.join(named)}",
        "version": _distinct(rows, "version"),
        "up": shown_time(min(each.uptime_s for each in reported)) if reported else None,
        "zone": _distinct(rows, "zone"),
        "free": None if disk is None else _shown_space(disk),
        "bookie": _distinct(rows, "bookie"),
        "leads": sum(row["leads"] for row in rows),
        "replicas": sum(row["replicas"] for row in rows),
        "most_behind": max((row["most_behind"] for row in rows if row["most_behind"] is not None), default=None),
    }


def _distinct(rows: Sequence[Mapping[str, Any]], name: str) -> str | None:
    return ", ".join(sorted({row[name] for row in rows if row[name] is not None})) or None


STATES = ("ready", "draining", "not ready", "no answer")
"""States of a node, worst last."""


def _node_row(node: NodeView, report: ClusterReport, processes: Processes) -> dict[str, Any]:
    reported = node.report if node.HasField("report") else None
    behind = [
        replica.behind
        for partition in report.partitions
        for replica in partition.replicas
        if replica.server == node.id and replica.HasField("behind")
    ]
    row = {
        "node": node.id,
        "state": _state(node),
        "version": reported.version if reported else None,
        "up": shown_time(reported.uptime_s) if reported else None,
        "zone": (reported.zone or None) if reported else None,
        "free": _shown_space(reported.disk) if reported else None,
        "bookie": reported.bookie.state if reported and reported.HasField("bookie") else None,
        "leads": len(node.leads),
        "replicas": len(node.holds),
        "most_behind": max(behind, default=None),
    }
    for each in processes:
        if each["id"] == node.id:
            row |= {"pid": each["pid"], "redis": each["resp"], "grpc": each["grpc"], "http": each["http"]}
    return row


def _state(node: NodeView) -> str:
    if node.no_answer:
        return "no answer"
    if node.report.draining:
        return "draining"
    return "not ready" if node.report.not_ready else "ready"


def _rest(report: ClusterReport) -> list[str]:
    metadata, ring = report.metadata, report.ring
    kind = {"zookeeper": "ZooKeeper", "etcd": "etcd"}.get(metadata.kind, metadata.kind)
    age = f", last read {shown_time(metadata.read_age_s)} ago" if metadata.read_age_s > OLD_S else ""
    wanted, retired = to_serve(report), retired_in(report)
    served = sum(each.served for each in wanted)
    leaving = f"; retired: {', '.join(retired)}, kept by pins (`kvstore partition pins`)" if retired else ""
    lines = [
        f"{kind} {metadata.address}: {metadata.state}{age}",
        f"partitions: {served} of {len(wanted)} are served{leaving}; ring version {ring.version}, {_moves(report)}",
        _copies(report),
    ]
    if report.HasField("repair"):
        lines.append(f"auto-recovery: {'on' if report.repair.enabled else 'off'}, {report.repair.marked:,} marked")
    snapshot = f"{shown_time(report.snapshot.age_s)} old" if report.HasField("snapshot") else "none is known"
    lines.append(f"access control: {'on' if report.access_on else 'off'}; last snapshot: {snapshot}")
    if report.cluster_version:
        lines.append(
            f"cluster version: {report.cluster_version}, which kvstore {release_for(report.cluster_version)} supports"
        )
    lines += [_balance(report)] if report.HasField("balance") else []
    lines += [_namespaces(report)] if report.namespaces else []
    lines += [_tls(report)] if any(each.report.HasField("tls") for each in report.nodes) else []
    return [*lines, f"as seen by {report.server}"]


def _balance(report: ClusterReport) -> str:
    """Return what the balancer does."""
    found = report.balance
    step = f"next: {found.step}" if found.step else "nothing to do"
    waits = f"; waits: {'; '.join(found.waits)}" if found.step and found.waits else ""
    return (
        f"balancer: {found.mode}, {found.made_last_hour} of {found.moves_per_hour} steps within the hour; {step}{waits}"
    )


def _copies(report: ClusterReport) -> str:
    """Return the number of under-replicated ledgers now, the number of all ledgers in the last count, and its age."""
    copies, counted = copies_of(report), report.copies
    bound = "up to " if copies.is_upper_bound else "" if copies.is_counted else "at least "
    lacking = f"{bound}{count(copies.lacking, 'ledger')} {_are(copies.lacking)} under-replicated"
    at_risk = f"{copies.at_risk:,} {_are(copies.at_risk)} at risk"
    if not copies.is_counted:
        return f"copies: {lacking}, {at_risk}; not all are counted yet"
    others = f" ({counted.foreign:,} of them written by other clients)" if counted.foreign else ""
    total = f"{count(counted.ledgers, 'ledger')}{others} {'was' if counted.ledgers == 1 else 'were'} counted"
    return f"copies: {lacking}, {at_risk}; {total} {shown_time(counted.age_s)} ago"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _namespaces(report: ClusterReport) -> str:
    """Return the namespaces that are near a quota or refused operations in the last minute. This is not a problem of
    the cluster."""
    warned = [f"{each.name}: {warning}" for each in report.namespaces if (warning := warning_of(each))]
    shown = "; ".join(warned[:NAMESPACES_SHOWN_MAX])
    more = len(warned) - NAMESPACES_SHOWN_MAX
    of = f"namespaces: {len(report.namespaces)}"
    if not warned:
        return f"{of}, none near a quota"
    return f"{of}; {shown}{f'; and {more} more (kvstore namespace list)' if more > 0 else ''}"


def _tls(report: ClusterReport) -> str:
    """Describe which nodes use TLS, and how many connections came without it."""
    reported = {each.id: each.report.tls for each in report.nodes if each.report.HasField("tls")}
    preferred = {id: tls for id, tls in reported.items() if tls.mode == "prefer"}
    without = [each.id for each in report.nodes if each.HasField("report") and each.id not in reported]
    soonest = min(tls.left_s for tls in reported.values())
    parts = [f"required by {', '.join(id for id in reported if id not in preferred) or 'no node'}"]
    if preferred:
        came = ", ".join(f"{id} ({tls.plain_connections:,} connections without it)" for id, tls in preferred.items())
        parts.append(f"preferred by {came}")
    if without:
        parts.append(f"not used by {', '.join(without)}")
    ends = f"expires in {soonest / 86_400:.0f} days" if soonest > 0 else "has expired"
    return f"TLS: {'; '.join(parts)}; the first certificate {ends}"


def _moves(report: ClusterReport) -> str:
    ring = report.ring
    if not ring.moves:
        return "no moves"
    eta = f", about {shown_time(ring.eta_s)} left" if ring.HasField("eta_s") else ""
    paused = ", paused" if ring.paused else ""
    return f"{ring.moves_done} of {ring.moves_planned} moves done, {ring.progress:.0%}{eta}{paused}"


def _shown_space(disk: DiskReport) -> str | None:
    return f"{shown_bytes(disk.free_bytes)} of {shown_bytes(disk.total_bytes)}" if disk.total_bytes else None


def shown_bytes(count: int) -> str:
    """Return a size in the largest unit that gives at least 1."""
    for name, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} B"


def shown_time(seconds: float) -> str:
    """Return a duration in its two largest units: days and hours, hours and minutes, minutes and seconds."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3_600:
        return f"{total // 60} min {total % 60} s"
    if total < 86_400:
        return f"{total // 3_600} h {total % 3_600 // 60} min"
    return f"{total // 86_400} d {total % 86_400 // 3_600} h"


def _plain(message: Any) -> dict[str, Any]:
    """Return every field by name. 64-bit numbers stay numbers, which protobuf's own JSON turns into text."""
    found: dict[str, Any] = _numbers(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        message.DESCRIPTOR,
    )
    return found


def _numbers(value: Any, descriptor: Any) -> Any:
    if descriptor is None or not isinstance(value, dict):
        return value
    fields = descriptor.fields_by_name
    found = {}
    for name, each in value.items():
        field = fields[name]
        if field.type in (field.TYPE_UINT64, field.TYPE_INT64):
            found[name] = [int(one) for one in each] if isinstance(each, list) else int(each)
        elif isinstance(each, list):
            found[name] = [_numbers(one, field.message_type) for one in each]
        else:
            found[name] = _numbers(each, field.message_type)
    return found
