"""The node's numbers as the Prometheus metrics that metric_table.py declares. Decides only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvstore.env.histogram import Histogram
from kvstore.server.http.metric_table import MetricKind, declared

PREFIX = "kvstore"

Statistics = Mapping[str, Any]

BUCKETS = {"_seconds": range(6, 25), "": range(13)}
"""Powers of two of a histogram's unit that bound the published buckets: 64 µs to 17 s, or 1 to 4,096."""


def metrics_of(part: str, values: Statistics) -> Iterator[Metric]:
    """Yield the metrics of one part of the node. For a table of tables, the names of the inner tables become the
    values of a label, which is named after the part in the singular. For a table of histograms, the label is the one
    in the declaration."""
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    if tables and len(tables) == len(values) and not any(map(_is_histograms, tables.values())):
        label = part.removesuffix("s")
        rows = {name: dict(_numbers("", _with_flags(table))) for name, table in tables.items()}
        for number in sorted({number for row in rows.values() for number in row}):
            metric = _metric(f"{label}_{number}", label)
            for name, row in rows.items():
                if number in row:
                    metric.add_metric([name], row[number])
            yield metric
        return
    distributed = tuple(f"{name}_" for name, value in values.items() if isinstance(value, Histogram))
    for name, value in values.items():
        if isinstance(value, Histogram):
            yield _histogram(f"{part}_{name}", {(): value})
        elif _is_histograms(value):
            yield _histogram(f"{part}_{name}", {(label,): each for label, each in sorted(value.items())})
    for name, value in _numbers("", values):
        if name.startswith(distributed):
            continue  # its count, sum and quantiles, which the histogram covers
        metric = _metric(f"{part}_{name}" if part else name)
        metric.add_metric([], value)
        yield metric


def _with_flags(table: Statistics) -> Statistics:
    """Add numeric flags for alerts. A replica reports its role and the reason why it stopped as words, but alerts
    need numbers. Moves are dropped, because their names are numbers."""
    if "role" not in table:
        return table
    rest = {name: value for name, value in table.items() if name != "moves"}
    return {**rest, "is_leader": table["role"] == "serving", "has_failed": table.get("failure") is not None}


def _metric(source: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    found = declared(source)
    kind = CounterMetricFamily if found.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(f"{PREFIX}_{found.name}", found.text, labels=labels)


def _histogram(source: str, rows: Mapping[tuple[str, ...], Histogram]) -> HistogramMetricFamily:
    found = declared(source)
    labels = [found.label] if any(rows) else []
    metric = HistogramMetricFamily(f"{PREFIX}_{found.name}", found.text, labels=labels)
    exponents = BUCKETS["_seconds" if found.name.endswith("_seconds") else ""]
    for row, counted in rows.items():
        buckets = [(f"{counted.unit * (1 << each):g}", float(sum(counted.buckets[: each + 1]))) for each in exponents]
        metric.add_metric(list(row), [*buckets, ("+Inf", float(counted.count))], counted.total)
    return metric


def _is_histograms(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(each, Histogram) for each in value.values())


def _numbers(prefix: str, values: Statistics) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for every number in nested tables. The names of the tables are joined with underscores.
    Text and lists are skipped."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{name}_", value)
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", float(value)
