"""The charts of the cluster: their series and units, and the values as JSON for ui.js. Decides only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from kvstore.server.status.sizes import size, span
from kvstore.server.ui.history import SERIES, ClusterHistory, Samples
from kvstore.server.ui.words import rate, share, took

PERIODS = {"1h": 3_600.0, "6h": 21_600.0, "24h": 86_400.0}
"""Periods that a page can show, in seconds. The first is the default."""
SHOWN_MIN_S = 600.0
"""Shortest time on the axis of a chart in seconds, while there are few samples."""
DIGITS = 4
WORDS = {
    "per second": rate,
    "bytes per second": lambda value: f"{size(value)}/s",
    "time": took,
    "count": lambda value: f"{value:,.0f}",
    "share": share,
}
"""How a value is written, by unit."""


class Chart(NamedTuple):
    """A chart. `unit` is a key of WORDS. `series` has pairs of a series' name and its label."""

    id: str
    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


CHARTS = (
    Chart("operations", "Operations per second", "per second", (("operations", "all"), ("writes", "writes"))),
    Chart("written", "Bytes written per second", "bytes per second", (("written_bytes", "written"),)),
    Chart("get", "Latency of reads, slowest node", "time", (("get p50", "p50"), ("get p99", "p99"))),
    Chart("put", "Latency of writes, slowest node", "time", (("put p50", "p50"), ("put p99", "p99"))),
    Chart("batch", "Latency of client batches, slowest node", "time", (("session p50", "p50"), ("session p99", "p99"))),
    Chart("queued", "Operations queued at leaders", "count", (("queued", "queued"),)),
    Chart("lag", "Maximum replica lag", "count", (("lag", "lag"),)),
    Chart("lacking", "Under-replicated ledgers", "count", (("lacking", "under-replicated"),)),
    Chart("disk", "Disk used, fullest disk", "share", (("disk_used", "used"),)),
)


def charts_of(samples: Samples) -> list[dict[str, Any]]:
    """Return the charts for the template. The caption says in words what the chart shows."""
    return [
        {
            "id": each.id,
            "title": each.title,
            "unit": each.unit,
            "series": [{"name": name, "label": label} for name, label in each.series],
            "caption": "; ".join(_caption(samples.series[name], each.unit, label) for name, label in each.series),
        }
        for each in CHARTS
    ]


def _caption(values: Sequence[float], unit: str, label: str) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return f"{label}: nothing measured yet"
    now = WORDS[unit](values[-1]) if not math.isnan(values[-1]) else "idle"
    return f"{label}: now {now}, highest {WORDS[unit](max(known))}"


def series_body(samples: Samples, period: str, date_s: float) -> bytes:
    """Return the values as JSON: times in seconds since 1970, and values by series, null if there was nothing to
    measure. `date_s` is the time now."""
    return orjson.dumps(
        {
            "from": round(date_s - max(SHOWN_MIN_S, min(PERIODS[period], -min(samples.times_s, default=0.0))), 1),
            "to": round(date_s, 1),
            "times": [round(date_s + each, 1) for each in samples.times_s],
            "series": {name: [_rounded(value) for value in samples.series[name]] for name in SERIES},
        }
    )


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.{DIGITS}g}")


def period_note(history: ClusterHistory, server: str, now: float) -> str:
    """Return a sentence on what the charts cover."""
    covered_s = history.covered_s(now)
    return (
        f"The whole cluster as node {server} has seen it, every 15 s, for {span(covered_s)}. "
        f"{server} keeps one day in memory and forgets it when it restarts. Times are in UTC."
    )
