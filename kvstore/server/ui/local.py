"""The pages of what servers keep themselves: clients, transactions, slow operations and audit entries; and the pages of
users and snapshots. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.meta.snapshots import SnapshotRecord
from kvstore.proto.admin_pb2 import (
    AccessGrant,
    AccessResponse,
    AuditEntry,
    AuditReport,
    ClientsReport,
    ClusterReport,
    SlowLogResponse,
    SlowOperation,
    StandingDecision,
    StandingIntent,
    TransactionsResponse,
)
from kvstore.server.access.audit import RECENT_MAX
from kvstore.server.redis.session import ShownClient
from kvstore.server.status.sizes import count, size, span
from kvstore.server.ui.cells import Cell, page_path, table
from kvstore.server.ui.subjects import of_cluster
from kvstore.server.ui.view import findings_of
from kvstore.server.ui.words import date, key, when

ROWS_MAX = 500
"""Maximum number of rows in a table of these pages."""


CLIENTS, TRANSACTIONS, SLOW, AUDIT = "clients", "transactions", "slow", "audit"
"""The methods by which each server reports its part of the pages about all servers (Surveyor.details)."""
CLIENT_COLUMNS = ("node", "connection", "address", "name", "user", "library", "protocol")
CLIENT_COUNTS = {
    "resp_connections": "Redis connections",
    "session_streams": "asyncio clients",
    "http_requests": "HTTP requests",
    "http_watches": "HTTP watch streams",
}
NOT_COUNTED = (
    "Blocking Python clients and other clients of the gRPC port are not counted, because gRPC does not report its "
    "connections."
)


def clients_report(clients: Iterable[ShownClient], statistics: Mapping[str, Any]) -> ClientsReport:
    """Return the clients of this node. `statistics` are those of its server."""
    report = ClientsReport(counts={name: int(statistics.get(name, 0)) for name in CLIENT_COUNTS})
    for each in clients:
        report.connections.add(**each._asdict())
    return report


def clients_page(found: Mapping[str, ClientsReport], silent: Mapping[str, str]) -> dict[str, Any]:
    """Return the context of the page of clients: of what each server reports, and why others do not."""
    counts = [
        [_node(node), *(Cell(f"{report.counts[name]:,}", "n") for name in CLIENT_COUNTS)]
        for node, report in found.items()
    ]
    rows = [
        [
            _node(node),
            Cell(str(each.id)),
            Cell(each.address),
            Cell(key(each.name) or "none", "wrap"),
            Cell(each.user or "none"),
            Cell(key(each.library) or "unknown", "wrap"),
            Cell(f"RESP{each.protocol}"),
        ]
        for node, report in found.items()
        for each in report.connections
    ]
    note = "" if rows else "No client is connected to the Redis port."
    if len(rows) > ROWS_MAX:
        note = f"The first {ROWS_MAX} connections are shown."
    return {
        "title": "Clients",
        "tables": [
            table(
                "counts",
                "Clients by node",
                ("node", *CLIENT_COUNTS.values()),
                counts,
                f"{NOT_COUNTED} {_unknown(silent)}".strip(),
            ),
            table("clients", "Connections to the Redis port", CLIENT_COLUMNS, rows[:ROWS_MAX], note),
        ],
    }


def _node(id_: str) -> Cell:
    return Cell(id_, link=page_path("node", id=id_))


def _unknown(silent: Mapping[str, str]) -> str:
    """Return a sentence about each server that reports nothing."""
    return " ".join(f"{server} is not included: {why}." for server, why in silent.items())


HANGING = ("transaction_hangs", "decision_not_delivered")
"""The codes of findings about transactions."""
INTENT_COLUMNS = ("partition", "leader", "key", "home", "transaction", "kind", "age")
DECISION_COLUMNS = ("partition", "leader", "home key", "transaction", "keys elsewhere", "age")


def oldest_of(found: TransactionsResponse) -> TransactionsResponse:
    """Return the oldest intents and decisions of each partition that this node leads, at most ROWS_MAX of each."""
    shown = TransactionsResponse()
    for replica in found.replicas:
        if replica.is_leader:
            kept = shown.replicas.add(partition=replica.partition, is_leader=True, sequence=replica.sequence)
            kept.intents.extend(sorted(replica.intents, key=_youth)[:ROWS_MAX])
            kept.decisions.extend(sorted(replica.decisions, key=_youth)[:ROWS_MAX])
    return shown


def _youth(standing: StandingIntent | StandingDecision) -> float:
    return -standing.age_s


def transactions_page(
    report: ClusterReport, found: Mapping[str, TransactionsResponse], silent: Mapping[str, str]
) -> dict[str, Any]:
    """Return the context of the page of transactions: of what each leader reports, and why other servers do not."""
    led = [(node, replica) for node, response in found.items() for replica in response.replicas if replica.is_leader]
    intents = [
        (each, [_partition(replica.partition), _node(node)]) for node, replica in led for each in replica.intents
    ]
    decisions = [
        (each, [_partition(replica.partition), _node(node)]) for node, replica in led for each in replica.decisions
    ]
    intent_rows = [
        [
            *place,
            _key(each.key),
            _partition(each.home),
            Cell(each.attempt),
            Cell("writes" if each.is_exclusive else "reads"),
            Cell(span(each.age_s), "n"),
        ]
        for each, place in sorted(intents, key=lambda row: _youth(row[0]))[:ROWS_MAX]
    ]
    decision_rows = [
        [*place, _key(each.home_key), Cell(each.attempt), Cell(f"{len(each.keys):,}", "n"), Cell(span(each.age_s), "n")]
        for each, place in sorted(decisions, key=lambda row: _youth(row[0]))[:ROWS_MAX]
    ]
    held = _bounded(sum(each.lead.intents for each in report.partitions), len(intent_rows), "intent")
    undelivered = _bounded(sum(each.lead.decisions for each in report.partitions), len(decision_rows), "decision")
    explained = "Most last for milliseconds. The home of an intent decides whether its transaction commits."
    unknown = f" {_unknown(silent)}" if silent else ""
    return {
        "title": "Transactions",
        **of_cluster(report),
        "findings": [each for each in findings_of(report) if each["code"] in HANGING],
        "tables": [
            table(
                "intents",
                "Keys that transactions hold",
                INTENT_COLUMNS,
                intent_rows,
                f"{held} {explained}{unknown}",
            ),
            table(
                "decisions",
                "Commits that are not known everywhere",
                DECISION_COLUMNS,
                decision_rows,
                f"{undelivered}{unknown}",
            ),
        ],
    }


def _partition(id_: str) -> Cell:
    return Cell(id_, link=page_path("partition", id=id_))


def _key(raw: bytes) -> Cell:
    return Cell(key(raw), "wrap", link=page_path("key", key=raw))


def _bounded(number: int, shown: int, noun: str) -> str:
    """Return the number of things in the whole cluster. The leaders count them a moment before they list them."""
    most = count(max(number, shown), noun)
    return f"{most}, of which the oldest {shown} are shown." if shown == ROWS_MAX else f"{most}."


SLOW_COLUMNS = (
    "time",
    "node",
    "where",
    "operation",
    "key's hash",
    "partition",
    "took",
    "of it",
    "operations",
    "no processor",
)


def slow_page(found: Mapping[str, SlowLogResponse], silent: Mapping[str, str]) -> dict[str, Any]:
    """Return the context of the page of slow operations: of what each server reports, and why others do not."""
    kept = [(each, node) for node, report in found.items() for each in report.operations]
    newest = sorted(kept, key=lambda row: -row[0].date_ms)[:ROWS_MAX]
    limits = ", ".join(
        f"{node} {report.slow_ms} ms ({report.total:,})" if report.slow_ms else f"{node} 0 (off)"
        for node, report in found.items()
    )
    note = f"Each node's `slow_ms`, and its number of slow operations since its start: {limits}."
    return {
        "title": "Slow log",
        "tables": [
            table(
                "slow",
                "Slow operations",
                SLOW_COLUMNS,
                [_slow(each, node) for each, node in newest],
                f"{_newest(len(kept), 'operation')} {note} {_unknown(silent)}".rstrip(),
            )
        ],
    }


def _newest(number: int, noun: str) -> str:
    """Return the number of things that the servers keep, of which a page shows the newest."""
    shown = f", of which the newest {ROWS_MAX} are shown" if number > ROWS_MAX else ", the newest first"
    return f"{count(number, noun)}{shown if number > 1 else ''}."


def _slow(operation: SlowOperation, node: str) -> list[Cell]:
    parts = sorted(operation.parts.items(), key=lambda part: -part[1])
    return [
        Cell(date(operation.date_ms)),
        _node(node),
        Cell(operation.at),
        Cell(operation.operation),
        Cell(operation.key or "none"),
        Cell(
            operation.partition or "none", link=operation.partition and page_path("partition", id=operation.partition)
        ),
        Cell(f"{operation.took_ms:,.0f} ms", "n"),
        Cell(", ".join(f"{name.replace('_', ' ')} {took_ms:,.0f} ms" for name, took_ms in parts if took_ms >= 0.5)),
        Cell(f"{operation.operations:,}", "n"),
        Cell(f"{operation.starved:.0%}", "n"),
    ]


SNAPSHOT_COLUMNS = ("snapshot", "kind", "begun", "age", "took", "rows", "size", "directory")


def snapshots_page(report: ClusterReport, records: Sequence[tuple[str, SnapshotRecord]] | str) -> dict[str, Any]:
    """Return the context of the page of snapshots. Instead of the snapshots there may be a reason why they are
    unknown."""
    page = {"title": "Snapshots", **of_cluster(report), "findings": findings_of(report, "snapshots")}
    if isinstance(records, str):
        return {**page, "tables": [table("snapshots", "Snapshots", SNAPSHOT_COLUMNS, [], f"Unknown: {records}")]}
    rows = [
        [
            Cell(name),
            Cell(each.kind if each.parent is None else f"{each.kind}, after {each.parent}"),
            Cell(date(each.started_ms)),
            Cell(span(max(0, report.date_ms - each.started_ms) / 1000), "n"),
            Cell(span((each.ended_ms - each.started_ms) / 1000), "n"),
            Cell(f"{each.rows:,}", "n"),
            Cell(size(each.size_bytes), "n"),
            Cell(each.where, "wrap"),
        ]
        for name, each in reversed(records)
    ]
    note = (
        f"{count(len(rows), 'snapshot')}, the newest first. A snapshot whose files were deleted may still be listed: "
        "`kvstore snapshot list DIRECTORY` reads the files."
        if rows
        else "The cluster knows no snapshot. Take one with `kvstore snapshot create --to DIRECTORY`."
    )
    limit_s = report.snapshot_age_max_s
    limit = f"The last should be at most {span(limit_s)} old." if limit_s else "No node limits its age."
    return {**page, "tables": [table("snapshots", "Snapshots", SNAPSHOT_COLUMNS, rows, f"{note} {limit}")]}


def users_page(
    found: AccessResponse | str, audited: Mapping[str, AuditReport], silent: Mapping[str, str], date_ms: int
) -> dict[str, Any]:
    """Return the context of the page of users, with the audit entries that each server reports, and why others do
    not. Instead of the users there may be a reason why they are unknown."""
    audit = _audit(audited, silent)
    if isinstance(found, str):
        unknown = table("users", "Users", ("user",), [], f"Unknown: {found}")
        return {"title": "Users and audit log", "tables": [unknown, audit]}
    users = [
        [Cell(user.name), Cell("yes" if user.has_password else "no"), Cell(", ".join(user.roles) or "none")]
        for user in found.users
    ]
    roles = [[Cell(role.name), Cell("; ".join(map(_right, role.grants)) or "none")] for role in found.roles]
    tokens = [[Cell(each.id), Cell(each.user), Cell(when(each.expires_ms, date_ms))] for each in found.tokens]
    state = "Clients must authenticate." if found.on else "Access control is off: every client may do everything."
    shown = [
        table("users", "Users", ("user", "password", "roles"), users, state),
        table("roles", "Roles", ("role", "rights"), roles),
        table("tokens", "Tokens", ("token", "user", "expires"), tokens),
    ]
    return {
        "title": "Users and audit log",
        "tables": [shown[0], *(each for each in shown[1:] if each["rows"]), audit],
    }


def _right(grant: AccessGrant) -> str:
    return f"{grant.right} on {f'keys with the prefix {key(grant.prefix)}' if grant.prefix else 'all keys'}"


AUDIT_COLUMNS = ("time", "node", "who", "from", "call", "arguments", "outcome", "reason")


def audit_report(recent: Iterable[Mapping[str, Any]]) -> AuditReport:
    """Return the audit entries of this node. `recent` are its last lines (AuditLog.recent)."""
    return AuditReport(
        entries=[
            AuditEntry(
                date_ms=each["time"],
                who=each["who"],
                address=each["from"],
                call=each["call"],
                arguments=each.get("arguments", ""),
                outcome=each["outcome"],
                why=each.get("why", ""),
            )
            for each in recent
        ]
    )


def _audit(found: Mapping[str, AuditReport], silent: Mapping[str, str]) -> dict[str, Any]:
    kept = [(each, node) for node, report in found.items() for each in reversed(report.entries)]
    rows = [
        [
            Cell(date(each.date_ms)),
            _node(node),
            Cell(each.who),
            Cell(each.address),
            Cell(each.call),
            Cell(each.arguments, "wrap"),
            Cell(each.outcome),
            Cell(each.why, "wrap"),
        ]
        for each, node in sorted(kept, key=lambda row: -row[0].date_ms)[:ROWS_MAX]
    ]
    note = (
        f"{_newest(len(kept), 'line')} Each node keeps the last {RECENT_MAX} since its start. The files of the "
        "audit log have all lines."
    )
    return table("audit", "Audit log", AUDIT_COLUMNS, rows, f"{note} {_unknown(silent)}".rstrip())
