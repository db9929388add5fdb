"""Recent latencies of clients' operations, computed from how the histograms have grown in the last minute. Decides
only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.env.histogram import BUCKETS, Histogram

WITHIN_S, KEEP_S = 60.0, 10.0
"""Length of the window, and interval at which counts are kept."""
UNIT_S = 1e-6
SOURCES: Mapping[str, Sequence[tuple[str, str]]] = {
    "get": (("resp_command_s", "GET"), ("grpc_call_s", "Get"), ("http_request_s", "get")),
    "put": (("resp_command_s", "SET"), ("grpc_call_s", "Put"), ("http_request_s", "put")),
    "session": (("grpc_call_s", "Execute"), ("grpc_call_s", "Session")),
}
"""Tables and names of the server's histograms, by operation. A batch of a session, as Python clients send it, counts as
one operation whatever it contains."""

Counts = dict[str, list[int]]


class Latency(NamedTuple):
    """The latency of one kind of operation. Each quantile is an upper bound: a power of two of microseconds."""

    operation: str
    p50_s: float
    p99_s: float
    timed: int
    within_s: float


class RecentLatencies:
    """The recent latencies of one server. Memory is bounded, even if nobody calls `take` for a long time."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Counts]] = deque(maxlen=int(WITHIN_S / KEEP_S) + 1)

    def take(self, histograms: Mapping[str, Any], now: float) -> list[Latency]:
        """Return the latencies of the operations counted in the last WITHIN_S seconds before `now`, or since the
        last call if that is longer ago. Kinds without operations are omitted. `histograms` contains the server's
        histograms by table and name."""
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
