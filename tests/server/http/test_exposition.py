"""Metrics in Prometheus' text format."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvstore.server.http.exposition import exposition

VALUES = (0.0, 1.0, -0.5, 999_999.0, 1e6, -1e6, 123_456_789.0, 1.5e21, 1e-7, math.inf, -math.inf, math.nan, 7)


class Fixed:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _families() -> list[Metric]:
    gauge = GaugeMetricFamily("kvstore_some", "A sentence: with \\ and\na line.", labels=["partition", "a"])
    for number, value in enumerate(VALUES):
        gauge.add_metric([f"p{number}", 'quoted "\\\n'], value)
    counter = CounterMetricFamily("kvstore_count", "Counted.", labels=[])
    counter.add_metric([], 3.0)
    histogram = HistogramMetricFamily("kvstore_taken_seconds", "Taken.", labels=["command"])
    histogram.add_metric(["get"], [("0.1", 1.0), ("+Inf", 2.0)], 0.25)
    return [gauge, counter, histogram]


def test_exposition_equals_that_of_the_library() -> None:
    registry = CollectorRegistry()
    registry.register(Fixed(_families()))  # type: ignore[arg-type]
    assert exposition(_families()) == generate_latest(registry)


def test_process_metrics_are_written_as_by_the_library() -> None:
    found = list(ProcessCollector(namespace="", registry=None).collect())
    if not found:
        pytest.skip("this system has no /proc")
    registry = CollectorRegistry()
    registry.register(Fixed(found))  # type: ignore[arg-type]
    assert exposition(found) == generate_latest(registry)
