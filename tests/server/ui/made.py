"""Made-up parts of a node for its pages. Every name that a client, a user or an operator chooses is hostile."""

from __future__ import annotations

from kvstore.env.logs.audit_lines import AuditLines
from kvstore.errors import StoreError
from kvstore.meta.snapshots import SnapshotRecord
from kvstore.proto.admin_pb2 import AccessResponse, AuditReport, ClientsReport, SlowLogResponse, TransactionsResponse
from kvstore.proto.data_pb2 import PinsResponse
from kvstore.server.access.audit import AuditLog
from kvstore.server.redis.session import ShownClient
from kvstore.server.ui.details import NodeDetails
from kvstore.server.ui.local import audit_report, clients_report
from kvstore.types import PartitionId

HOSTILE = "<script>alert(1)</script>"
RAW = HOSTILE.encode()
NOW_MS = 1_700_000_000_000


def made_details(fault: StoreError | None = None) -> NodeDetails:
    """Return parts with one row in each table. With `fault`, the metadata store does not answer."""

    async def pins(partition: PartitionId) -> PinsResponse:
        if fault is not None:
            raise fault
        response = PinsResponse()
        response.pins.add(partition=partition, id="nightly", ledger=3, deadline_ms=0, servers=["n2", "n3"])
        return response

    async def access() -> AccessResponse:
        if fault is not None:
            raise fault
        return users()

    async def snapshots() -> list[tuple[str, SnapshotRecord]]:
        if fault is not None:
            raise fault
        record = SnapshotRecord(
            kind="full", parent=None, started_ms=NOW_MS, ended_ms=NOW_MS + 90_000, rows=12_345, size_bytes=3 << 30,
            where=f"s3://backups/{HOSTILE}",
        )  # fmt: skip
        return [("2026-01-01", record), ("2026-01-02", record)]

    return NodeDetails(pins=pins, access=access, snapshots=snapshots)


def clients() -> ClientsReport:
    """Return the report of one server."""
    return clients_report(
        [ShownClient(7, "10.0.0.9:5", RAW, HOSTILE, b"redis-py", 3)] * 2, {"resp_connections": 2, "session_streams": 5}
    )


def users() -> AccessResponse:
    response = AccessResponse(on=True)
    response.users.add(name=HOSTILE, has_password=True, roles=["reader"])
    response.roles.add(name="reader").grants.add(role="reader", right="read", prefix=RAW)
    response.tokens.add(id="0123456789ab", user="ada", expires_ms=1)
    return response


def transactions() -> TransactionsResponse:
    response = TransactionsResponse()
    leader = response.replicas.add(partition="p1", is_leader=True)
    leader.intents.add(key=RAW, attempt="p2/7/12", home="p2", is_exclusive=True, age_s=45.0)
    leader.decisions.add(home_key=b"h", attempt="p1/3/4", age_s=5.0, keys=[b"a", b"b"])
    follower = response.replicas.add(partition="p2", is_leader=False)
    follower.intents.add(key=b"shown by its leader", attempt="p2/7/12", home="p2")
    return response


def slow(date_ms: int = NOW_MS) -> SlowLogResponse:
    response = SlowLogResponse(slow_ms=100, total=41)
    operation = response.operations.add(
        date_ms=date_ms, at="leader", operation=HOSTILE, key="9c27d7d4f5a1b2c3", partition="p1", took_ms=312.4,
        operations=3, starved=0.25,
    )  # fmt: skip
    operation.parts["append"], operation.parts["apply"] = 300.0, 12.4
    return response


def audited(*outcomes: str, date_ms: int = NOW_MS) -> AuditReport:
    """Return the report of a server whose audit log has one line for each outcome."""
    audit = AuditLog(lambda: 5.0, lambda: date_ms, AuditLines())
    for outcome in outcomes:
        audit.note("ada", "ipv4:10.0.0.9:5", "ChangeAccess", outcome, arguments=HOSTILE, why="no such role", change=1)
    return audit_report(audit.recent)
