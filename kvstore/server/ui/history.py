"""Stores what the regular surveys found in the last day, for charts of the whole cluster. The memory is bounded: a
number for each sample of each series, 0.4 MB in total. Decides only."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.proto.admin_pb2 import ClusterReport, DiskReport
from kvstore.server.status.health import copies_of
from kvstore.server.status.latencies import SOURCES
from kvstore.server.status.surveyor import WATCH_S

KEPT_S = 86_400.0
SAMPLES = int(KEPT_S / WATCH_S)
GAP_S = 4 * WATCH_S
"""Time without a sample from which a chart shows a gap: this node was down or paused."""
POINTS = 240
"""Number of points in a chart. Of a longer period, each point stands for several samples."""
UNKNOWN = math.nan
_NO_LATENCY = (UNKNOWN, UNKNOWN)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


MEANS = ("operations", "writes", "written_bytes")
"""Series of which a point is the mean of its samples. Of all others a point is the largest sample."""
LATENCIES = tuple(f"{operation} {quantile}" for operation in SOURCES for quantile in ("p50", "p99"))
SERIES = (*MEANS, "queued", "lag", "disk_used", "lacking", *LATENCIES)


class Samples(NamedTuple):
    """The points of charts."""

    times_s: list[float]
    """Seconds before now, rising: the last is the newest."""
    series: Mapping[str, list[float]]
    """Values by the name of the series; UNKNOWN if there was nothing to measure."""


class ClusterHistory:
    """A ring buffer of samples. A new sample replaces the oldest."""

    def __init__(self) -> None:
        self._rings = {name: array("f", bytes(4 * SAMPLES)) for name in SERIES}
        self._times = array("d", bytes(8 * SAMPLES))
        self.taken = 0
        """Number of samples since the start."""

    @property
    def size_bytes(self) -> int:
        return sum(len(ring) * ring.itemsize for ring in (*self._rings.values(), self._times))

    def covered_s(self, now: float) -> float:
        """Return the age of the oldest sample in seconds; 0 if there is none."""
        oldest = self.taken % SAMPLES if self.taken >= SAMPLES else 0
        return now - self._times[oldest] if self.taken else 0.0

    def take(self, report: ClusterReport, now: float) -> None:
        """Store a sample. `now` is a time in seconds that never goes back."""
        at = self.taken % SAMPLES
        self._times[at] = now
        for name, value in sample_of(report).items():
            self._rings[name][at] = value
        self.taken += 1

    def last(self, period_s: float, now: float) -> Samples:
        """Return the samples of the last `period_s` seconds, combined into about POINTS points."""
        at_once = max(1, round(period_s / WATCH_S / POINTS))
        groups = list(self._groups(now - period_s, at_once))
        times = [self._times[group[-1]] - now if group else UNKNOWN for group in groups]
        for place, group in enumerate(groups):
            if not group:  # a gap lies between two groups
                times[place] = (times[place - 1] + times[place + 1]) / 2
        return Samples(times, {name: self._points(name, groups) for name in SERIES})

    def _groups(self, since: float, at_once: int) -> Iterable[Sequence[int]]:
        """Yield the places of the samples of each point, oldest first, and an empty group for each gap."""
        places = [number % SAMPLES for number in range(max(0, self.taken - SAMPLES), self.taken)]
        group: list[int] = []
        before = math.inf
        for number, place in enumerate(places, self.taken - len(places)):
            if self._times[place] < since:
                continue
            is_late = self._times[place] - before > GAP_S
            before = self._times[place]
            if group and (is_late or number % at_once == 0):  # the same samples share a point in every answer
                yield group
                group = []
            if is_late:
                yield ()
            group.append(place)
        if group:
            yield group

    def _points(self, name: str, groups: Iterable[Sequence[int]]) -> list[float]:
        ring = self._rings[name]
        combine: Callable[[Sequence[float]], float] = _mean if name in MEANS else max
        known = ([value for place in group if not math.isnan(value := ring[place])] for group in groups)
        return [combine(values) if values else UNKNOWN for values in known]


def sample_of(report: ClusterReport) -> dict[str, float]:
    """Return the value of every series."""
    leads = [each.lead for each in report.partitions]
    found = {
        "operations": sum(lead.ops_per_s for lead in leads),
        "writes": sum(lead.writes_per_s for lead in leads),
        "written_bytes": sum(lead.written_bytes_per_s for lead in leads),
        "queued": float(sum(lead.queued for lead in leads)),
        "lag": float(lag_of(report)),
        "disk_used": fullest_disk_of(report),
        "lacking": float(copies_of(report).lacking),
    }
    slowest = slowest_of(report)
    for operation in SOURCES:
        found[f"{operation} p50"], found[f"{operation} p99"] = slowest.get(operation, _NO_LATENCY)
    return found


def lag_of(report: ClusterReport) -> int:
    """Return the largest lag of a replica, in mutations."""
    return max((each.behind for partition in report.partitions for each in partition.replicas), default=0)


def fullest_disk_of(report: ClusterReport) -> float:
    """Return the used share of the fullest disk of a node's data, from 0 to 1; UNKNOWN if no node reports its disk."""
    return max((used_of(node.report.disk) for node in report.nodes if node.report.disk.total_bytes), default=UNKNOWN)


def used_of(disk: DiskReport) -> float:
    return 1 - disk.free_bytes / disk.total_bytes


def slowest_of(report: ClusterReport) -> dict[str, tuple[float, float]]:
    """Return, by operation, the largest 50th and 99th percentile that a node reports, in seconds. Percentiles of
    several nodes cannot be combined, and the slowest node is the one to look at."""
    found: dict[str, tuple[float, float]] = {}
    for node in report.nodes:
        for each in node.report.latencies:
            p50_s, p99_s = found.get(each.operation, (0.0, 0.0))
            found[each.operation] = max(p50_s, each.p50_s), max(p99_s, each.p99_s)
    return found
