"""The charts of the cluster: what is sampled, what is kept, and the vendored library that draws them."""

from __future__ import annotations

import hashlib
import math
import re
from importlib import resources

import orjson
import pytest

from kvstore.proto.admin_pb2 import ClusterReport
from kvstore.server.status.latencies import SOURCES
from kvstore.server.status.surveyor import WATCH_S
from kvstore.server.ui import dashboard
from kvstore.server.ui.charts import CHARTS, PERIODS, WORDS, charts_of, series_body
from kvstore.server.ui.history import POINTS, SAMPLES, SERIES, ClusterHistory, Samples, sample_of
from kvstore.server.ui.view import LATENCIES
from tests.server.status.test_health import silent, well

FILES = resources.files(dashboard.__package__) / "files"


def load(ops: float, queued: int = 0) -> ClusterReport:
    report = well()
    report.partitions[0].lead.ops_per_s, report.partitions[0].lead.queued = ops, queued
    return report


def filled(count: int) -> ClusterHistory:
    history = ClusterHistory()
    for number in range(count):
        history.take(load(float(number), queued=number), WATCH_S * number)
    return history


def test_sample_covers_the_whole_cluster() -> None:
    report = load(300.0, queued=4)
    report.partitions[1].lead.ops_per_s, report.partitions[1].replicas[2].behind = 100.0, 17
    for node, p50_s, p99_s in ((0, 0.001, 0.064), (1, 0.002, 0.004)):
        report.nodes[node].report.latencies.add(operation="get", p50_s=p50_s, p99_s=p99_s)
    report.nodes[1].report.disk.free_bytes = report.nodes[1].report.disk.total_bytes // 4
    sample = sample_of(report)
    assert (sample["operations"], sample["queued"], sample["lag"]) == (400.0, 4.0, 17.0)
    assert (sample["get p50"], sample["get p99"]) == (0.002, 0.064), "each percentile of the slowest node"
    assert sample["disk_used"] == 0.75, "of the fullest disk"
    assert math.isnan(sample["put p99"]), "a latency that nobody measured is unknown, not zero"
    assert set(sample) == set(SERIES)


def test_sample_of_a_silent_cluster_has_no_disk() -> None:
    report = well()
    silent(report, 1, 2, 3)
    assert math.isnan(sample_of(report)["disk_used"])


@pytest.mark.parametrize("count", [0, 1, SAMPLES, SAMPLES + 1, 2 * SAMPLES + 7])
def test_last_day_is_kept_in_bounded_memory(count: int) -> None:
    history = filled(count)
    samples = history.last(PERIODS["24h"], WATCH_S * max(0, count - 1))
    assert len(samples.times_s) <= POINTS + 2
    assert history.size_bytes <= 400_000
    assert sorted(samples.times_s) == samples.times_s
    if count:
        assert samples.times_s[-1] == 0.0
        assert samples.series["queued"][-1] == count - 1


def test_point_of_a_long_period_is_a_mean_of_rates_and_the_most_of_others() -> None:
    history = filled(SAMPLES)
    samples = history.last(PERIODS["24h"], WATCH_S * (SAMPLES - 1))
    at_once = SAMPLES // POINTS
    assert samples.series["queued"][:2] == [at_once - 1, 2 * at_once - 1]
    assert samples.series["operations"][0] == (at_once - 1) / 2
    assert len(filled(10).last(PERIODS["1h"], WATCH_S * 9).times_s) == 10, "a short period has every sample"


def test_pause_of_the_node_is_a_gap() -> None:
    history = filled(3)
    history.take(load(7.0), 1_000.0)
    samples = history.last(PERIODS["1h"], 1_000.0)
    assert [value for value in samples.series["operations"] if not math.isnan(value)] == [0.0, 1.0, 2.0, 7.0]
    assert math.isnan(samples.series["operations"][3])
    assert sorted(samples.times_s) == samples.times_s


def test_values_are_dated_and_unknown_ones_are_null() -> None:
    history = filled(2)
    found = orjson.loads(series_body(history.last(PERIODS["1h"], WATCH_S), "1h", 5_000.0))
    assert found["times"] == [5_000.0 - WATCH_S, 5_000.0]
    assert (found["from"], found["to"]) == (4_400.0, 5_000.0), "few samples do not shrink to a corner"
    assert (found["series"]["operations"], found["series"]["put p99"]) == ([0.0, 1.0], [None, None])
    full = orjson.loads(series_body(filled(SAMPLES).last(PERIODS["6h"], WATCH_S * SAMPLES), "6h", 90_000.0))
    assert full["to"] - full["from"] == pytest.approx(PERIODS["6h"], abs=120)


def test_caption_says_what_the_chart_shows() -> None:
    series = {name: [math.nan] for name in SERIES} | {"operations": [900.0, 12.0], "get p99": [0.004, math.nan]}
    captions = {each["id"]: each["caption"] for each in charts_of(Samples([-15.0, 0.0], series))}
    assert captions["operations"] == "all: now 12/s, highest 900/s; writes: nothing measured yet"
    assert captions["get"].endswith("p99: now idle, highest 4.0 ms")


def test_every_series_and_unit_of_a_chart_is_known() -> None:
    script = (FILES / "ui.js").read_text("utf-8")
    for chart in CHARTS:
        assert {name for name, _ in chart.series} <= set(SERIES)
        assert chart.unit in WORDS
        assert f'"{chart.unit}": ' in script, "ui.js has a word for the unit"
    assert set(LATENCIES) == set(SOURCES)


def test_vendored_library_is_the_published_one() -> None:
    listed = dict(re.findall(r"\| `([\w.]+)` \|.*\| `([0-9a-f]{64})` \|", (FILES / "uplot/README.md").read_text()))
    assert set(listed) == {"uplot.js", "uplot.css", "LICENSE"}
    for name, digest in listed.items():
        assert hashlib.sha256((FILES / "uplot" / name).read_bytes()).hexdigest() == digest
    assert "uPlot (v1.6.32)" in (FILES / "uplot/uplot.js").read_text()[:200]
