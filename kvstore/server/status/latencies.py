"""How long clients' operations took of late: what histograms have counted since a minute ago. Decides only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.env.histogram import BUCKETS, Histogram

WITHIN_S, KEEP_S = 60.0, 10.0
"""The time that counts, and how often the counts are kept meanwhile."""
UNIT_S = 1e-6
SOURCES: Mapping[str, Sequence[tuple[str, str]]] = {
    "get": (("resp_command_s", "GET"), ("grpc_call_s", "Get"), ("http_request_s", "get")),
    "put": (("resp_command_s", "SET"), ("grpc_call_s", "Put"), ("http_request_s", "put")),
    "session": (("grpc_call_s", "Execute"), ("grpc_call_s", "Session")),
}
"""Operation → tables of the server's histograms, and names in them. A session's batch, as Python clients send them, is
one whatever is in it."""

Counts = dict[str, list[int]]


class Latency(NamedTuple):
    """The latency of one kind of operation. The quantiles are upper bounds, powers of two of a microsecond."""

    operation: str
    p50_s: float
    p99_s: float
    timed: int
    within_s: float


class RecentLatencies:
    """The recent latencies of one server. Keeps a few sets of counts, however long nobody asks."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Counts]] = deque(maxlen=int(WITHIN_S / KEEP_S) + 1)

    def take(self, histograms: Mapping[str, Any], now: float) -> list[Latency]:
        """Tell what was counted since WITHIN_S before `now`, or since this was last asked if that is longer ago:
        nothing of operations that did not come. `histograms`: those of the server part, by table and name."""
        counts = {operation: _sum(histograms, sources) for operation, sources in SOURCES.items()}
        while len(self._kept) > 1 and now - self._kept[1][0] >= WITHIN_S:
            self._kept.popleft()
        at, before = self._kept[0] if self._kept else (now, counts)
        if not self._kept or now - self._kept[-1][0] >= KEEP_S:
            self._kept.append((now, counts))
        found = []
        for operation, buckets in counts.items():
            recent = Histogram(UNIT_S)
            recent.buckets = [count - was for count, was in zip(buckets, before[operation], strict=True)]
            recent.count = sum(recent.buckets)
            if recent.count > 0:
                found.append(Latency(operation, recent.quantile(0.5), recent.quantile(0.99), recent.count, now - at))
        return found


def _sum(histograms: Mapping[str, Any], sources: Sequence[tuple[str, str]]) -> list[int]:
    total = [0] * BUCKETS
    for table, name in sources:
        histogram = histograms.get(table, {}).get(name)
        if histogram is not None:
            total = [count + more for count, more in zip(total, histogram.buckets, strict=True)]
    return total
