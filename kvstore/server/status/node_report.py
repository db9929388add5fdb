"""Builds a node's report on itself. It reads only memory, and neither waits nor asks other nodes
(docs/how-to/check-health.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kvstore.bookie import Bookie
from kvstore.meta.address import parse
from kvstore.meta.store import MetadataStore
from kvstore.partition.moves.import_driver import MoveProgress
from kvstore.partition.state.engine import RESERVE_BYTES
from kvstore.proto import admin_pb2
from kvstore.ring import MoveId
from kvstore.server.clock.clock_sync import ClockReport
from kvstore.server.load.load import PartitionLoad
from kvstore.server.status.latencies import Latency
from kvstore.types import PartitionId, ServerId

Table = Mapping[str, Any]


class HasStatistics(Protocol):
    """A worker or an auditor of auto-recovery."""

    def statistics(self) -> Table: ...


class TlsStatus(Protocol):
    """The state of TLS in this process. Implemented by kvstore.server.node.ProcessTls."""

    @property
    def mode(self) -> str: ...
    @property
    def left_s(self) -> float:
        """Seconds until the certificate expires; negative after that."""
        ...

    @property
    def plain_connections(self) -> int: ...
    @property
    def is_failing(self) -> bool: ...
    def fault(self) -> str:
        """Return the reason why clients that verify this node's certificate cannot connect, or an empty string if
        they can."""
        ...


class Reported(Protocol):
    """The node that reports. Implemented by kvstore.server.app.Node."""

    @property
    def id(self) -> ServerId: ...
    @property
    def version(self) -> str: ...
    @property
    def zookeeper(self) -> str: ...
    @property
    def store(self) -> MetadataStore: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    @property
    def bookie(self) -> Bookie | None: ...
    @property
    def worker(self) -> HasStatistics | None: ...
    @property
    def auditor(self) -> HasStatistics | None: ...
    @property
    def resident_bytes(self) -> Callable[[], int]: ...
    @property
    def tls(self) -> TlsStatus | None: ...
    def not_ready(self) -> list[str]: ...
    def replicas(self) -> Mapping[PartitionId, Table]: ...


def report_of(
    node: Reported,
    member: Table,
    *,
    uptime_s: float,
    read_age_s: float,
    starved: float,
    access_on: bool,
    date: ClockReport,
    ring_version: int,
    loads: Mapping[PartitionId, PartitionLoad],
    moves: Mapping[MoveId, MoveProgress],
    latencies: Iterable[Latency],
    snapshot: Table,
    disk: tuple[int, int],
    reserve_bytes: int,
    copies: admin_pb2.CopiesReport | None,
) -> admin_pb2.NodeReport:
    """Combine the reports of the node's parts into one. `member` is the node's registration, and `snapshot` is the
    state of the last snapshot as in LastSnapshot.statistics. `disk` has the total and the free bytes of the data
    directory's disk. `copies` is the count of copies, if this server counts them."""
    report = admin_pb2.NodeReport(
        id=node.id,
        version=node.version,
        zone=member["zone"],
        roles=member["roles"],
        uptime_s=uptime_s,
        grpc=member["grpc"],
        resp=member["resp"],
        http=member["http"],
        not_ready=node.not_ready(),
        draining=node.is_draining,
        ring_version=ring_version,
        access_on=access_on,
        **_date_report(date),
        resident_bytes=node.resident_bytes(),
        loop_starved=starved,
    )
    report.metadata.MergeFrom(metadata_report(node.zookeeper, node.store, read_age_s))
    if disk[0]:
        report.disk.MergeFrom(_disk_report(*disk, is_server="server" in member["roles"]))
    if (tls := node.tls) is not None:
        report.tls.mode, report.tls.left_s = tls.mode, tls.left_s
        report.tls.plain_connections, report.tls.failing = tls.plain_connections, tls.is_failing
    if copies is not None:
        report.copies.MergeFrom(copies)
    if node.bookie is not None:
        report.bookie.MergeFrom(_bookie_report(node.bookie, node.id, member["zone"], reserve_bytes))
    if node.worker is not None:
        report.repair.MergeFrom(_repair_report(node.worker.statistics()))
    if node.auditor is not None:
        audit = node.auditor.statistics()
        report.is_auditor, report.bookies_lost = bool(audit["active"]), int(audit["bookies_lost"])
    if node.is_open:
        for partition, table in node.replicas().items():
            report.replicas.append(replica_report(partition, table, loads.get(partition)))
    for move, progress in sorted(moves.items()):
        report.copied.add(id=move, **progress._asdict())
    for latency in latencies:
        report.latencies.add(**latency._asdict())
    if snapshot:
        report.snapshot.age_s = snapshot["snapshot_age_s"]
        report.snapshot.rows, report.snapshot.bytes = int(snapshot["snapshot_rows"]), int(snapshot["snapshot_bytes"])
    return report


def add_troubles(report: admin_pb2.NodeReport, troubles: Mapping[str, str]) -> None:
    """Add the reasons why directories cannot be written. The key "" of `troubles` is the data directory; the other
    directories belong to the bookie."""
    if trouble := troubles.get(""):
        report.disk.trouble = trouble
    of_bookie = [why for directory, why in sorted(troubles.items()) if directory]
    if of_bookie and report.HasField("bookie"):
        report.bookie.disk.trouble = of_bookie[0]


def metadata_report(address: str, store: MetadataStore, read_age_s: float) -> admin_pb2.MetadataReport:
    """Return the state of the metadata store as this node sees it."""
    kind = parse(address).kind.value
    return admin_pb2.MetadataReport(kind=kind, address=address, state=store.state.name.lower(), read_age_s=read_age_s)


def _date_report(date: ClockReport) -> dict[str, Any]:
    doubt = "" if date.is_sure else date.doubt or "it is too early to tell"
    return {"date_doubt": doubt, "date_behind_s": date.behind_ms / 1000}


def _disk_report(total: int, free: int, *, is_server: bool) -> admin_pb2.DiskReport:
    """Return the state of the data directory's disk. The reserve is what its replicas need."""
    return admin_pb2.DiskReport(total_bytes=total, free_bytes=free, reserve_bytes=RESERVE_BYTES if is_server else 0)


def _bookie_report(bookie: Bookie, node: ServerId, zone: str, reserve_bytes: int) -> admin_pb2.BookieReport:
    counted = bookie.statistics()
    report = admin_pb2.BookieReport(
        id=bookie.id,
        address=bookie.address,
        zone=zone,
        node=node,
        state="readonly" if counted["readonly"] else "writable",
        ledgers=int(counted["ledgers"]),
        limbo_ledgers=int(counted["limbo_ledgers"]),
        refused_other_entry=int(counted["refused_other_entry"]),
        damaged_records=int(counted["damaged_records"]),
    )
    try:
        total, free = bookie.space()
    except OSError:
        total = free = 0  # unknown if the disk has failed
    if total:
        report.disk.total_bytes, report.disk.free_bytes, report.disk.reserve_bytes = total, free, reserve_bytes
    for each in bookie.directories():
        if each.why_readonly and free >= reserve_bytes:  # otherwise the numbers show it
            report.disk.trouble = each.why_readonly
        report.directories.add(path=each.path, failure=each.failure, free_bytes=each.free_bytes, readonly=each.readonly)
    return report


def _repair_report(counted: Table) -> admin_pb2.RepairReport:
    return admin_pb2.RepairReport(
        enabled=bool(counted["enabled"]),
        marked=int(counted["ledgers_marked"]),
        repairing=int(counted["ledgers_repairing"]),
        unreadable=int(counted["ledgers_unreadable"]),
        repaired=int(counted["ledgers_repaired"]),
        copied_bytes=int(counted["copied_bytes"]),
    )


def replica_report(partition: PartitionId, table: Table, load: PartitionLoad | None) -> admin_pb2.ReplicaReport:
    """Return a replica's numbers (kvstore.partition.Partition.statistics) as a message. Decides only."""
    report = admin_pb2.ReplicaReport(
        partition=partition,
        role=table["role"],
        leader=table["leader"] or "",
        sequence=table["seq"],
        durable_sequence=table["durable_seq"],
        epoch=table["epoch"],
        keys=table["keys"],
        failure=table["failure"] or "",
        lead_failure=table["lead_failure"],
        is_in_doubt=table["is_in_doubt"],
        moves_stuck=table["moves_stuck"],
        pins_held=table["pins_held"],
    )
    leading, log = table["leading"], table["log"]
    if table["role"] != "serving" or leading is None:
        return report
    report.lead.epoch, report.lead.queued = leading["epoch"], leading["queued"]
    report.lead.intents, report.lead.decisions = leading["intents"], leading["decisions"]
    report.lead.oldest_intent_s = leading["oldest_intent_s"]
    report.lead.oldest_decision_s = leading["oldest_decision_s"]
    if log is not None:
        report.lead.ledgers, report.lead.trimmed_sequence = log["ledgers"], log["trimmed_seq"]
        report.lead.ledgers_lacking_copies = log["ledgers_lacking_copies"]
        report.lead.ledgers_at_risk = log["ledgers_at_risk"]
        report.lead.ledgers_undecodable = log["ledgers_undecodable"]
        for bookie, ledgers in log["ledgers_lacking_at"]:
            report.lead.lacking_at.add(bookie=bookie, ledgers=ledgers)
    if load is not None:
        report.lead.ops_per_s, report.lead.writes_per_s = load.ops_per_s, load.writes_per_s
        report.lead.written_bytes_per_s = load.written_bytes_per_s
        for hot in load.hot:
            report.lead.hot_keys.add(key=hot.key, share=hot.share)
    return report
