"""The page contains all figures, needs no other file, and marks the events on every timeline."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from kvstore.loadtest.report.baseline import FigureChange
from kvstore.loadtest.report.charts import BOTTOM, HEIGHT, RIGHT, TOP, WIDTH, Curve, EventMark, timeline
from kvstore.loadtest.report.figures import Event, Run, document
from kvstore.loadtest.report.goals import Goals
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.report.report import page

OPTIONS = {"workload": "ycsb-a", "shape": "chaos"}


def made(*, wrong: str = "", missing: str | None = None) -> dict[str, Any]:
    recorder = Recorder()
    for number in range(100):
        at = 1_000 + number / 10
        recorder.done("resp", "read", intended=at, ended=at + 0.004, service_s=0.003)
    recorder.failed("grpc", "update", "OutcomeUnknown", intended=1_003, ended=1_004)
    if wrong:
        recorder.is_wrong(wrong)
    events = [Event(1_002, "kill -9 n2"), Event(1_006, "start n2", "ready after 1.5 s", ended=1_007.5)]
    run = Run(
        began=1_000,
        ended=1_010,
        counted_from=1_001,
        options=OPTIONS,
        machine={"cores": 2},
        goals=Goals(),
        events=events,
        users=dict.fromkeys(range(1000, 1010), 5),
        knee={
            "sustained_per_s": 900.0,
            "failed_per_s": 1_000.0,
            "missing": missing,
            "trials": [{"per_s": 900.0, "is_carried": True}],
        },
        notes=["a process of it used 97% of a processor"],
    )
    return document(recorder, run)


def test_every_timeline_is_well_formed_and_marks_every_event() -> None:
    charts = re.findall(r"<svg.*?</svg>", page(made()), re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        marks = [each for each in ElementTree.fromstring(chart).iter() if each.get("class") == "mark"]
        assert [mark.get("data-event") for mark in marks] == ["1", "2"]
        assert [mark.findtext("title") for mark in marks] == ["kill -9 n2", "start n2 ready after 1.5 s"]
        assert [mark.find("rect") is not None for mark in marks] == [False, True]


def test_event_after_the_run_is_listed_and_on_no_chart() -> None:
    """Its mark was beside the chart, with a band of negative width."""
    document = made()
    document["events"].append(
        {
            **document["events"][0],
            "at_s": 12.0,
            "ended_s": 15.0,
            "what": "remove partition p7",
            "watched_s": 0,
            "least_done": None,
            "max_ms": None,
        }
    )
    html = page(document)
    assert "after the run" in html
    assert 'data-event="2"' in html
    assert 'data-event="3"' not in html


def test_event_that_ends_after_the_run_stays_on_the_chart() -> None:
    drawn = timeline("t", [Curve("l", [(0.0, 1.0)], "one")], [EventMark(1, 50.0, 900.0, "x")], seconds=100)
    x, width = map(float, re.findall(r'<rect class="band" x="([\d.]+)".*? width="([\d.]+)"', drawn)[0])
    assert width > 0
    assert x + width <= WIDTH - RIGHT + 0.1


def test_page_loads_no_external_resource() -> None:
    text = page(made())
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(|https?://", text)


def test_page_shows_operations_errors_events_and_the_knee() -> None:
    text = page(made(), [FigureChange("p99_ms", stored=3.0, pace=1.0, now=9.0, limit=8.0, is_fallen=True)])
    for expected in (
        "OutcomeUnknown",
        "kill -9 n2",
        "ready after 1.5 s",
        "900/s",
        "lowest rate not sustained: 1,000/s",
        "WORSE",
        "✓ all goals met",
    ):
        assert expected in text
    assert "<p>Note: a process of it used 97% of a processor</p>" in text


def test_knee_that_was_not_found_is_no_highest_rate() -> None:
    text = page(made(missing="the knee was not found: no rate was sustained"))
    assert "the knee was not found: no rate was sustained" in text
    assert "Highest sustained rate" not in text


def test_failed_run_says_so_and_its_wrong_values_are_text() -> None:
    text = page(made(wrong="b'k' holds <script>alert(1)</script>"))
    assert "✗ 1 reads returned wrong values" in text
    assert "✓" not in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


def test_unreadable_baseline_is_shown_in_the_report_header_too() -> None:
    """The exit code is 1 for every run."""
    document = made()
    document["verdict"]["reasons"].append("the baseline x.json cannot be read")
    text = page(document)
    assert "✗ the baseline x.json cannot be read" in text
    assert "✓" not in text


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.004, 9_000.0], [5.0], [None, 3.0, None, 4.0]])
def test_curves_stay_inside_the_chart(values: list[float | None], *, is_log: bool) -> None:
    chart = timeline(
        "t", [Curve("l", list(enumerate(values)), "one")], [EventMark(1, 1.0, None, "x")], seconds=3, is_log=is_log
    )
    curve = next(each for each in ElementTree.fromstring(chart).iter("path") if each.find("title") is not None)
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.-]+)", curve.get("d", ""))]
    assert all(TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1 for y in heights)
    shown = [value for value in values if value is not None and (value > 0 or not is_log)]
    assert len(heights) == len(shown)


def test_page_shows_the_goal_and_the_warm_up_on_the_timelines() -> None:
    document = made()
    document["options"] = OPTIONS | {"p99_ms": "read=20,250"}
    rates, times, users = re.findall(r"<svg.*?</svg>", page(document), re.DOTALL)
    assert "p99 goal 250 ms" in times
    assert "p99 goal" not in rates + users
    assert all(chart.count(">warm-up<") == 1 for chart in (rates, times, users))
    assert "p99 goal" not in page(made())


def test_page_names_the_version_and_shows_options_in_tables() -> None:
    document = made()
    document["machine"] = {"version": "0.2.0, commit 0123456789ab", "cores": 2, "generator_busiest": 0.12345}
    shown = page(document)
    assert "kvstore 0.2.0, commit 0123456789ab</p>" in shown
    assert '<td class="text">workload</td><td class="text">ycsb-a</td>' in shown
    assert '<td class="text">generator busiest</td><td class="text">0.12</td>' in shown
    assert "{" not in re.sub(r"<style>.*?</style>", "", shown, flags=re.DOTALL), "no JSON"
