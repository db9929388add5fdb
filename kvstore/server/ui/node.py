"""The page of one node, from the status that the node itself reports. Decides only.

Every node has this page, also while it starts, and if it is a bookie without a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.server.ui.cells import Cell, table

Status = Mapping[str, Any]

REFRESH_S = 5
FACTS = {
    "version": "version",
    "python": "Python",
    "roles": "roles",
    "metadata": "metadata store",
    "ring_version": "ring version",
    "servers": "servers up",
}
PARTITION_COLUMNS = ("partition", "role", "leader", "sequence", "epoch", "keys", "queued")


def node_page_of(status: Status, *, has_dashboard: bool) -> dict[str, Any]:
    """Return the context of the template."""
    faults, leaderless = status.get("not_ready") or [], status.get("leaderless") or []
    partitions, leaders = status.get("partitions") or {}, status.get("leaders") or {}
    rows = [_partition(name, replica) for name, replica in sorted(partitions.items())]
    led = [[Cell(name), Cell(str(leader))] for name, leader in sorted(leaders.items())]
    tables = [
        table("partitions", "Partitions on this node", PARTITION_COLUMNS, rows),
        table("leaders", "Leaders of all partitions, as this node knows them", ("partition", "leader"), led),
        *_numbers(status),
    ]
    return {
        "id": str(status.get("id", "?")),
        "has_dashboard": has_dashboard,
        "refresh_s": REFRESH_S,
        "grade": "DOWN" if faults else "DEGRADED" if leaderless else "HEALTHY",
        "readiness": f"not ready: {'; '.join(map(str, faults))}" if faults else "ready",
        "leaderless": ", ".join(map(str, leaderless)),
        "facts": " · ".join(_facts(status)),
        "tables": [each for each in tables if each["rows"]],
    }


def _facts(status: Status) -> Iterator[str]:
    for name, shown in FACTS.items():
        value = status.get(name)
        if value not in (None, "", []):
            yield f"{shown} {', '.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def _partition(name: str, replica: Status) -> list[Cell]:
    leading, failure = replica.get("leading") or {}, replica.get("failure")
    role = Cell(f"stopped: {failure}", "bad") if failure else Cell(str(replica.get("role")))
    numbers = (replica.get("seq"), replica.get("epoch"), replica.get("keys"), leading.get("queued", ""))
    return [Cell(name), role, Cell(str(replica.get("leader") or "none")), *map(_number, numbers)]


def _numbers(status: Status) -> Iterator[dict[str, Any]]:
    for part in ("server", "bookie"):
        values = status.get(part)
        if isinstance(values, Mapping):
            rows = [[Cell(str(name).replace("_", " ")), _number(value)] for name, value in values.items()]
            yield table(part, f"Statistics of the {part}", ("name", "value"), rows)


def _number(value: object) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell("" if value is None else str(value))
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:,.4g}", "n")
