"""A fall against the stored figures is told from noise, and only like is compared with like."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from loadtest.baseline import Tolerance, baseline_of, compare, differences
from loadtest.compare import main, run_compare

RUN: dict[str, Any] = {
    "options": {"workload": "ycsb-a", "shape": "steady", "rate": 400.0, "seconds": 105.0, "report": "x.html"},
    "machine": {"cores": 2, "processor": "one", "load_1m": 0.4, "pulse_p50_ms": 1.0, "pulse_p95_ms": 2.0},
    "total": {
        "per_s": 400.0,
        "achieved": 1.0,
        "p50_ms": 4.0,
        "p95_ms": 10.0,
        "p99_ms": 20.0,
        "service_p50_ms": 3.0,
        "service_p99_ms": 15.0,
    },
    "verdict": {"is_met": True, "reasons": []},
}


def changed(part: str, **figures: Any) -> dict[str, Any]:
    found = deepcopy(RUN)
    found[part] |= figures
    return found


def fallen(document: dict[str, Any]) -> list[str]:
    return [line.figure for line in compare(baseline_of(RUN), document, Tolerance()) if line.is_fallen]


def test_the_same_run_has_not_fallen() -> None:
    assert fallen(RUN) == []
    assert differences(baseline_of(RUN), RUN) == []


@pytest.mark.parametrize(
    ("figure", "still", "no_more"),
    [("per_s", 281.0, 279.0), ("achieved", 0.71, 0.69), ("p99_ms", 39.9, 40.1), ("p50_ms", 8.9, 9.1)],
)
def test_each_figure_may_fall_so_far_and_no_further(figure: str, still: float, no_more: float) -> None:
    assert fallen(changed("total", **{figure: still})) == []
    assert fallen(changed("total", **{figure: no_more})) == [figure]


def test_a_better_run_has_not_fallen() -> None:
    assert fallen(changed("total", per_s=900.0, p99_ms=1.0)) == []


def test_on_a_machine_that_is_slower_just_now_latencies_may_be_as_much_longer_and_no_more() -> None:
    slow = changed("machine", pulse_p50_ms=3.0, pulse_p95_ms=8.0)
    slow["total"] |= {"p50_ms": 23.9, "p95_ms": 79.9, "p99_ms": 159.9, "service_p50_ms": 17.9, "service_p99_ms": 119.9}
    assert fallen(slow) == []
    slow["total"] |= {"p50_ms": 24.1, "p99_ms": 160.1}
    assert fallen(slow) == ["p50_ms", "p99_ms"]


def test_a_rate_falls_whatever_the_machine_does() -> None:
    slow = changed("machine", pulse_p50_ms=100.0, pulse_p95_ms=100.0)
    slow["total"]["per_s"] = 279.0
    assert fallen(slow) == ["per_s"]


def test_a_run_without_a_pulse_is_not_compared() -> None:
    (reason,) = differences(baseline_of(RUN), changed("machine", pulse_p50_ms=None))
    assert reason == "pulse_p50_ms was not measured"


@pytest.mark.parametrize(("part", "name"), [("options", "rate"), ("options", "workload"), ("machine", "cores")])
def test_another_run_or_machine_is_not_compared(part: str, name: str) -> None:
    (reason,) = differences(baseline_of(RUN), changed(part, **{name: 7}))
    assert reason.startswith(f"{name} was")


def test_where_the_report_goes_makes_no_difference() -> None:
    assert differences(baseline_of(RUN), changed("options", report="y.html", seconds=60.0)) == []


def test_the_command_ends_with_1_on_a_fall_and_2_if_it_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    results.write_text(json.dumps(RUN))
    assert run_compare(results, baseline, Tolerance()) == 2
    assert run_compare(results, baseline, Tolerance(), save=True) == 0
    assert run_compare(results, baseline, Tolerance()) == 0
    results.write_text(json.dumps(changed("total", per_s=100.0)))
    assert run_compare(results, baseline, Tolerance()) == 1
    assert "per_s" in capsys.readouterr().err
    results.write_text(json.dumps(changed("options", rate=9.0)))
    assert run_compare(results, baseline, Tolerance()) == 2
    for unfit in ({key: value for key, value in RUN.items() if key != "total"}, []):
        results.write_text(json.dumps(unfit))
        assert run_compare(results, baseline, Tolerance()) == 2
    baseline.write_text('{"format": 99}')
    assert run_compare(results, baseline, Tolerance()) == 2


def test_a_run_that_failed_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    failed = changed("verdict", is_met=False, reasons=["3 reads gave wrong values", "kill -9 n1: no cluster"])
    results.write_text(json.dumps(failed))
    baseline.write_text("as it was")
    assert run_compare(results, baseline, Tolerance(), save=True) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 reads gave wrong values" in line
    assert baseline.read_text() == "as it was"


def test_a_run_whose_baseline_was_none_can_be_the_first(tmp_path: Path) -> None:
    """That there is no baseline is nothing that the run did."""
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    results.write_text(json.dumps(changed("verdict", reasons=["the baseline cannot be read"])))
    assert run_compare(results, baseline, Tolerance(), save=True) == 0
    assert run_compare(results, baseline, Tolerance()) == 0


@pytest.mark.parametrize(("per_s", "code"), [(400.0, 0), (250.0, 1)])
def test_the_command_line_has_the_usual_tolerance(tmp_path: Path, per_s: float, code: int) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    baseline.write_text(json.dumps(baseline_of(RUN)))
    results.write_text(json.dumps(changed("total", per_s=per_s)))
    with pytest.raises(SystemExit) as ended:
        main([str(results), str(baseline)])
    assert ended.value.code == code
