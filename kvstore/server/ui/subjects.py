"""The pages of one node, one partition and one bookie, from a report of the cluster. Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.proto.admin_pb2 import (
    BookieReport,
    ClusterReport,
    DirectoryReport,
    Grade,
    LedgersResponse,
    NodeReport,
    NodeView,
    PartitionView,
    ReplicaReport,
    ReplicaView,
)
from kvstore.proto.data_pb2 import PinsResponse, PinStatus
from kvstore.server.status import health
from kvstore.server.status.sizes import count, size, span
from kvstore.server.ui.cells import Cell, Fact, page_path, table
from kvstore.server.ui.ledgers import COLUMNS as LEDGER_COLUMNS
from kvstore.server.ui.ledgers import row_of
from kvstore.server.ui.view import (
    LATENCIES,
    bookie_free,
    bookie_state,
    bookie_used,
    disk_free,
    findings_of,
    hot_keys,
    latencies_of,
    metadata_state,
    moves_of,
    partition_state,
    state_of,
    verdict_of,
)
from kvstore.server.ui.words import rate, silence, when

LEDGERS_SHOWN = 10
"""Number of ledgers on the page of a partition: the newest ones."""


def of_cluster(report: ClusterReport) -> dict[str, str]:
    """Return what a page about a part of the cluster shows of the whole."""
    grade = Grade.Name(report.health.grade)
    return {"server": report.server, "grade": grade, "verdict": "" if grade == "HEALTHY" else verdict_of(report)}


def _alone(report: ClusterReport, partition: PartitionView) -> ClusterReport:
    """Return the report with the findings about one partition, which `report` may have combined with others."""
    alone = ClusterReport()
    alone.CopyFrom(report)
    del alone.partitions[:], alone.findings[:]
    alone.partitions.append(partition)
    alone.findings.extend(health.findings_of(alone))
    return alone


def node_page(report: ClusterReport, node: NodeView) -> dict[str, Any]:
    """Return the context of the page of a node, which may not answer."""
    tables = []
    if node.HasField("report"):
        tables = [
            table("replicas", "Replicas on this node", REPLICA_COLUMNS, map(_own_replica, node.report.replicas)),
            table("refusals", "Connections that others refuse", ("by", "reason"), _refusals(node.report)),
        ]
    return {
        "title": f"Node {node.id}",
        **of_cluster(report),
        "facts": list(_node_facts(report, node)),
        "findings": findings_of(report, f"node {node.id}"),
        "tables": [each for each in tables if each["rows"]],
    }


def _node_facts(report: ClusterReport, view: NodeView) -> Iterable[Fact]:
    if view.no_answer:
        yield Fact("state", silence(view.no_answer), "bad")
        yield Fact("leads, last known", ", ".join(view.leads) or "nothing")
        yield Fact("should have replicas of", ", ".join(view.holds) or "nothing")
        return
    node = view.report
    yield Fact("state", *state_of(node))
    yield Fact("leads", ", ".join(view.leads) or "nothing")
    yield Fact("version", node.version)
    yield Fact("roles", ", ".join(node.roles))
    yield Fact("zone", node.zone or "none")
    yield Fact("uptime", span(node.uptime_s))
    yield Fact("Redis", node.resp or "none")
    yield Fact("gRPC", node.grpc or "none")
    yield Fact("HTTP", node.http or "none", link=address_of(node, page_path("node")))
    for (_, text), label in zip(latencies_of(view), LATENCIES.values(), strict=True):
        yield Fact(label, text)
    yield _fact("data disk free", disk_free(node.disk))
    yield Fact("memory", size(node.resident_bytes))
    yield Fact("waits for a processor", f"{node.loop_starved:.0%} of the time")
    yield Fact("metadata store", metadata_state(node), "" if node.metadata.state == "connected" else "bad")
    yield Fact("ring version", f"{node.ring_version:,}")
    yield Fact("cluster time", node.date_doubt or "sure", "warn" if node.date_doubt else "")
    if node.HasField("tls"):
        yield Fact("TLS", f"{node.tls.mode}; the certificate is valid for {span(node.tls.left_s)}")
    if node.HasField("bookie"):
        yield Fact("bookie", node.bookie.id, link=page_path("bookie", id=node.bookie.id))
    if node.HasField("repair"):
        done = f"{node.repair.repairing} now, {node.repair.repaired:,} since the start"
        yield Fact("repairs", done if node.repair.enabled else "off")
    if node.is_auditor:
        yield Fact("auditor", "yes")


def address_of(node: NodeReport, path: str) -> str:
    """Return the address of a page at another node; empty if the node has no HTTP port."""
    return f"http{'s' if node.HasField('tls') else ''}://{node.http}{path}" if node.http else ""


REPLICA_COLUMNS = ("partition", "role", "leader", "sequence", "epoch", "keys", "operations", "queued", "pins")


def _own_replica(replica: ReplicaReport) -> list[Cell]:
    role = Cell(f"stopped: {replica.failure}", "bad") if replica.failure else Cell(_role(replica.role))
    is_leader = replica.HasField("lead")
    return [
        Cell(replica.partition, link=page_path("partition", id=replica.partition)),
        role,
        Cell(replica.leader or "none"),
        Cell(f"{replica.sequence:,}", "n"),
        Cell(f"{replica.epoch:,}", "n"),
        Cell(f"{replica.keys:,}", "n"),
        Cell(rate(replica.lead.ops_per_s) if is_leader else "", "n"),
        Cell(f"{replica.lead.queued:,}" if is_leader else "", "n"),
        Cell(f"{replica.pins_held:,}", "n"),
    ]


def _role(role: str) -> str:
    return "leader" if role == "serving" else role


def _refusals(node: NodeReport) -> list[list[Cell]]:
    return [[Cell(each.by), Cell(each.reason)] for each in node.refused_by]


def partition_page(
    report: ClusterReport, partition: PartitionView, ledgers: LedgersResponse | str, pins: PinsResponse | str
) -> dict[str, Any]:
    """Return the context of the page of a partition. Instead of its ledgers and its pins there may be a reason why
    they are unknown."""
    moves = [each for each in report.ring.moves if partition.id in (each.source, each.target)]
    hot = hot_keys([partition])
    return {
        "title": f"Partition {partition.id}",
        **of_cluster(report),
        "facts": list(_partition_facts(partition)),
        "findings": findings_of(_alone(report, partition), f"partition {partition.id}"),
        "tables": [
            table("replicas", "Replicas", VIEW_COLUMNS, map(_replica, partition.replicas)),
            *([moves_of(report, moves)] if moves else []),
            hot,
            _ledgers(partition.id, ledgers),
            _pins(pins, report.date_ms),
        ],
    }


def _partition_facts(partition: PartitionView) -> Iterable[Fact]:
    lead = partition.lead
    yield Fact("state", *partition_state(partition))
    leader = partition.leader
    yield Fact("leader", leader or "none", link=page_path("node", id=leader) if leader else "")
    yield Fact("epoch", f"{partition.epoch:,}")
    yield Fact("share of keys", f"{partition.share:.1%}")
    yield Fact("keys", f"{partition.keys:,}")
    yield Fact("sequence", f"{partition.sequence:,}")
    if not partition.HasField("lead"):
        return
    yield Fact("operations", rate(lead.ops_per_s))
    yield Fact("writes", rate(lead.writes_per_s))
    yield Fact("written", f"{size(lead.written_bytes_per_s)}/s")
    yield Fact("queued", f"{lead.queued:,}")
    lacking = lead.ledgers_lacking_copies
    yield Fact("under-replicated ledgers", f"{lacking:,} of {lead.ledgers:,}", "warn" if lacking else "")
    yield Fact("log kept", f"from sequence {lead.trimmed_sequence:,} on" if lead.trimmed_sequence else "complete")
    yield Fact("transactions", f"{count(lead.intents, 'intent')}, {count(lead.decisions, 'decision')}")


VIEW_COLUMNS = ("server", "state", "role", "sequence", "lag", "change")


def _replica(replica: ReplicaView) -> list[Cell]:
    if replica.failure:
        state = Cell(f"stopped: {replica.failure}", "bad")
    elif replica.is_in_doubt:
        state = Cell("in doubt", "bad")
    else:
        state = Cell("up", "good") if replica.is_up else Cell("down", "bad")
    change = "joining" if replica.is_joining else "leaving" if replica.is_leaving else "none"
    failed = f"; could not lead: {replica.lead_failure}" if replica.lead_failure else ""
    return [
        Cell(replica.server, link=page_path("node", id=replica.server)),
        state,
        Cell(f"{_role(replica.role) or '?'}{failed}"),
        Cell(f"{replica.sequence:,}" if replica.role else "?", "n"),
        Cell(f"{replica.behind:,}" if replica.HasField("behind") else "?", "n"),
        Cell(change),
    ]


def _ledgers(partition: str, ledgers: LedgersResponse | str) -> dict[str, Any]:
    title = "Newest ledgers"
    if isinstance(ledgers, str):
        return table("ledgers", title, LEDGER_COLUMNS, [], f"Unknown: {ledgers}")
    rows = [row_of(each) for each in reversed(ledgers.ledgers[-LEDGERS_SHOWN:])]
    found = table("ledgers", title, LEDGER_COLUMNS, rows)
    return {**found, "more": page_path("ledgers", partition=partition), "more_label": f"All ledgers of {partition}"}


PIN_COLUMNS = ("pin", "keeps the log from", "readable at", "replicas that keep it", "ends")


def _pins(pins: PinsResponse | str, date_ms: int) -> dict[str, Any]:
    if isinstance(pins, str):
        return table("pins", "Pins", PIN_COLUMNS, [], f"Unknown: {pins}")
    note = "Snapshots, readers of the change feed and moves pin the log, so that it is not trimmed."
    rows = [_pin(each, date_ms) for each in pins.pins]
    return table("pins", "Pins", PIN_COLUMNS, rows, f"{note} {count(len(rows), 'pin')} now.")


def _pin(pin: PinStatus, date_ms: int) -> list[Cell]:
    at = f"entry {pin.position_entry} of ledger {pin.position_ledger}" if pin.HasField("position_ledger") else "no"
    return [
        Cell(pin.id),
        Cell(f"ledger {pin.ledger}" if pin.HasField("ledger") else "does not keep it"),
        Cell(at),
        Cell(", ".join(pin.servers) or "none"),
        Cell(when(pin.deadline_ms, date_ms) if pin.deadline_ms else "with its session"),
    ]


def bookie_page(report: ClusterReport, bookie: BookieReport) -> dict[str, Any]:
    """Return the context of the page of a bookie."""
    found = [(each.id, at) for each in report.partitions for at in each.lead.lacking_at if at.bookie == bookie.id]
    rows = [
        [Cell(partition, link=page_path("partition", id=partition)), Cell(f"{at.ledgers:,}", "n warn")]
        for partition, at in found
    ]
    tables = [
        table("directories", "Directories", DIRECTORY_COLUMNS, map(_directory, bookie.directories)),
        table("lacking", "Partitions with under-replicated ledgers here", ("partition", "ledgers"), rows),
    ]
    return {
        "title": f"Bookie {bookie.id}",
        **of_cluster(report),
        "facts": list(_bookie_facts(bookie)),
        "findings": findings_of(report, f"bookie {bookie.id}")
        + (findings_of(report, f"node {bookie.node}") if bookie.no_answer else []),
        "tables": [each for each in tables if each["rows"]],
        "more": page_path("ledgers", bookie=bookie.id),
        "more_label": "Ledgers with entries on this bookie",
    }


def _bookie_facts(bookie: BookieReport) -> Iterable[Fact]:
    yield Fact("state", *bookie_state(bookie))
    yield Fact("node", bookie.node or "not reported", link=page_path("node", id=bookie.node) if bookie.node else "")
    yield Fact("address", bookie.address or "?")
    if bookie.zone or not bookie.no_answer:
        yield Fact("zone", bookie.zone or "none")
    yield _fact("disk free", bookie_free(bookie.disk))
    yield _fact("used by ledgers", bookie_used(bookie.disk))
    yield Fact("kept in reserve", size(bookie.disk.reserve_bytes) if bookie.disk.reserve_bytes else "?")
    yield Fact("under-replicated ledgers", f"{bookie.lacking_ledgers:,}", "warn" if bookie.lacking_ledgers else "")
    if bookie.no_answer or not bookie.node:
        return  # the bookie protocol reports only free space and state
    yield Fact("ledgers", f"{bookie.ledgers:,}")
    yield Fact("ledgers in limbo", f"{bookie.limbo_ledgers:,}", "warn" if bookie.limbo_ledgers else "")
    yield Fact("records with a wrong checksum, since its start", f"{bookie.damaged_records:,}")
    refused = bookie.refused_other_entry
    yield Fact("adds refused for another payload", f"{refused:,}", "warn" if refused else "")


DIRECTORY_COLUMNS = ("path", "state", "free")


def _directory(directory: DirectoryReport) -> list[Cell]:
    if directory.failure:
        state = Cell(f"failed: {directory.failure}", "bad")
    else:
        state = Cell("read-only", "bad") if directory.readonly else Cell("writable", "good")
    return [Cell(directory.path), state, Cell(size(directory.free_bytes), "n")]


def _fact(name: str, cell: Cell) -> Fact:
    return Fact(name, cell.text, cell.tone)
