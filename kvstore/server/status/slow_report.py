"""The slow log of one node as a message. Decides only."""

from __future__ import annotations

from kvstore.env.slow_log import KEPT, SlowLog
from kvstore.proto.admin_pb2 import SlowLogResponse


def slow_report(slow: SlowLog, most: int = 0, key: str = "") -> SlowLogResponse:
    """Return at most `most` of the kept operations, the newest first; 0: all. With `key`, return only operations on
    keys with this hash."""
    response = SlowLogResponse(slow_ms=slow.slow_ms, total=slow.total)
    for each in slow.latest(most or KEPT, key):
        response.operations.add(
            date_ms=each.date_ms,
            at=each.at,
            operation=each.operation,
            key=each.key,
            partition=each.partition,
            took_ms=each.took_s * 1000,
            parts={name: seconds * 1000 for name, seconds in each.parts.items()},
            operations=each.operations,
            starved=each.starved,
        )
    return response
