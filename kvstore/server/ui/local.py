"""The pages of what one node keeps itself: its clients, its transactions, its slow operations, its audit entries; and
those of users and snapshots. Decides only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.meta.snapshots import SnapshotRecord
from kvstore.proto.admin_pb2 import AccessGrant, AccessResponse, SlowLogResponse, SlowOperation, TransactionsResponse
from kvstore.server.redis.session import ShownClient
from kvstore.server.status.sizes import count, size
from kvstore.server.ui.cells import Cell, page_path, table
from kvstore.server.ui.words import date, key, span, when

ROWS_MAX = 500
"""Maximum number of rows in a table of these pages."""


CLIENT_COLUMNS = ("connection", "address", "name", "user", "library", "protocol")
CLIENT_COUNTS = {
    "resp_connections": "Redis connection",
    "session_streams": "Python client",
    "http_requests": "HTTP request",
    "http_watches": "HTTP watch stream",
}


def clients_page(clients: Sequence[ShownClient], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the context of the page of clients. `numbers` are the statistics of the server."""
    counts = [count(numbers[name], label) for name, label in CLIENT_COUNTS.items() if name in numbers]
    rows = [
        [
            Cell(str(each.id)),
            Cell(each.address),
            Cell(key(each.name) or "none"),
            Cell(each.user or "none"),
            Cell(key(each.library) or "unknown"),
            Cell(f"RESP{each.protocol}"),
        ]
        for each in clients[:ROWS_MAX]
    ]
    note = "; ".join(counts)
    note += f". The first {ROWS_MAX} connections are shown." if len(clients) > ROWS_MAX else "."
    shown = table("clients", "Connections to the Redis port", CLIENT_COLUMNS, rows, note)
    return {"title": "Clients", "own": "Clients", "tables": [shown]}


INTENT_COLUMNS = ("partition", "key", "home", "transaction", "kind", "age")
DECISION_COLUMNS = ("partition", "home key", "transaction", "keys elsewhere", "age")


def transactions_page(found: TransactionsResponse) -> dict[str, Any]:
    """Return the context of the page of transactions."""
    led = [each for each in found.replicas if each.is_leader]
    intents = [
        [
            Cell(replica.partition, link=page_path("partition", id=replica.partition)),
            Cell(key(each.key), "wrap"),
            Cell(each.home),
            Cell(each.attempt),
            Cell("writes" if each.is_exclusive else "reads"),
            Cell(span(each.age_s), "n"),
        ]
        for replica in led
        for each in replica.intents
    ]
    decisions = [
        [
            Cell(replica.partition, link=page_path("partition", id=replica.partition)),
            Cell(key(each.home_key)),
            Cell(each.attempt),
            Cell(f"{len(each.keys):,}", "n"),
            Cell(span(each.age_s), "n"),
        ]
        for replica in led
        for each in replica.decisions
    ]
    return {
        "title": "Transactions",
        "own": "Transactions in the partitions",
        "tables": [
            _bounded("intents", "Keys that transactions hold", INTENT_COLUMNS, intents, "intent"),
            _bounded("decisions", "Commits that are not known everywhere", DECISION_COLUMNS, decisions, "decision"),
        ],
    }


SLOW_COLUMNS = ("time", "where", "operation", "key's hash", "partition", "took", "of it", "operations", "no processor")


def slow_page(found: SlowLogResponse) -> dict[str, Any]:
    """Return the context of the page of slow operations."""
    if not found.slow_ms:
        note = "No operation counts as slow: `slow_ms` is 0 on this node."
    else:
        note = f"Operations that took {found.slow_ms} ms or longer: {found.total:,} since the start."
    rows = map(_slow, found.operations)
    return {
        "title": "Slow log",
        "own": "Operations",
        "tables": [table("slow", "Slow operations", SLOW_COLUMNS, rows, note)],
    }


def _slow(operation: SlowOperation) -> list[Cell]:
    parts = sorted(operation.parts.items(), key=lambda part: -part[1])
    return [
        Cell(date(operation.date_ms)),
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


def snapshots_page(records: Sequence[tuple[str, SnapshotRecord]] | str, date_ms: int) -> dict[str, Any]:
    """Return the context of the page of snapshots. Instead of the snapshots there may be a reason why they are
    unknown."""
    if isinstance(records, str):
        unknown = table("snapshots", "Snapshots", SNAPSHOT_COLUMNS, [], f"Unknown: {records}")
        return {"title": "Snapshots", "tables": [unknown]}
    rows = [
        [
            Cell(name),
            Cell(each.kind if each.parent is None else f"{each.kind}, after {each.parent}"),
            Cell(date(each.started_ms)),
            Cell(span(max(0, date_ms - each.started_ms) / 1000), "n"),
            Cell(span((each.ended_ms - each.started_ms) / 1000), "n"),
            Cell(f"{each.rows:,}", "n"),
            Cell(size(each.size_bytes), "n"),
            Cell(each.where, "wrap"),
        ]
        for name, each in reversed(records)
    ]
    note = (
        f"The cluster knows {count(len(rows), 'snapshot')}, the newest first. A snapshot whose files were deleted "
        "may still be listed: `kvstore snapshot list DIRECTORY` reads the files."
        if rows
        else "The cluster knows no snapshot. Take one with `kvstore snapshot create --to DIRECTORY`."
    )
    return {"title": "Snapshots", "tables": [table("snapshots", "Snapshots", SNAPSHOT_COLUMNS, rows, note)]}


def users_page(found: AccessResponse | str, audited: Iterable[Mapping[str, Any]], date_ms: int) -> dict[str, Any]:
    """Return the context of the page of users. Instead of the users there may be a reason why they are unknown."""
    tables = [_audit(audited)]
    if isinstance(found, str):
        note = f"Unknown: {found}"
        return {
            "title": "Users and audit log",
            "own": "Audit log",
            "tables": [table("users", "Users", ("user",), [], note), *tables],
        }
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
    tables = [shown[0], *(each for each in shown[1:] if each["rows"]), *tables]
    return {"title": "Users and audit log", "own": "Audit log", "tables": tables}


def _right(grant: AccessGrant) -> str:
    return f"{grant.right} on {f'keys with the prefix {key(grant.prefix)}' if grant.prefix else 'all keys'}"


AUDIT_COLUMNS = ("time", "who", "from", "call", "arguments", "outcome", "reason")


def _audit(audited: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    named = ("who", "from", "call", "arguments", "outcome", "why")
    rows = [
        [
            Cell(date(int(each["time"]))),
            *(Cell(str(each.get(name, "")), "wrap" if name in ("arguments", "why") else "") for name in named),
        ]
        for each in audited
    ]
    entries = "1 entry" if len(rows) == 1 else f"{len(rows):,} entries"
    note = f"{entries} since this node's start, the newest first. The file of the audit log has all."
    return table("audit", "Audit log of this node", AUDIT_COLUMNS, rows, note)


def _bounded(name: str, title: str, columns: Sequence[str], rows: list[list[Cell]], noun: str) -> dict[str, Any]:
    note = f"{count(len(rows), noun)} in the partitions that this node leads"
    note += f"; the first {ROWS_MAX} are shown." if len(rows) > ROWS_MAX else "."
    return table(name, title, columns, rows[:ROWS_MAX], note)
