"""A regression from the stored figures is distinguished from noise, and only similar runs are compared."""

from __future__ import annotations

import json
from copy import deepcopy
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from kvstore.loadtest.compare import main, run_compare
from kvstore.loadtest.report.baseline import COUNT_MIN, Tolerance, baseline_of, compare, differences
from kvstore.loadtest.report.spoiled import EXIT


def operation(endpoint: str, name: str, **more: Any) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "operation": name,
        "count": 9_000,
        "per_s": 90.0,
        "p50_ms": 4.0,
        "p99_ms": 20.0,
    } | more


RUN: dict[str, Any] = {
    "options": {
        "workload": "ycsb-a",
        "shape": "steady",
        "rate": 400.0,
        "seconds": 105.0,
        "warmup": 10.0,
        "preload": True,
        "seed": 1,
        "report": "x.html",
        "endpoints": "GrpcUser,RespUser",
        "workers": 0,
        "nodes": 3,
        "partitions": 3,
    },
    "machine": {"cores": 2, "processor": "one", "load_1m": 0.4, "pulse_p50_ms": 1.0, "pulse_p95_ms": 2.0},
    "total": {"per_s": 400.0, "achieved": 1.0},
    "operations": [
        operation("grpc", "read"),
        operation("resp", "read", p50_ms=0.5, p99_ms=2.0),
        operation("resp", "scan", count=COUNT_MIN - 1),
    ],
    "verdict": {"is_met": True, "reasons": [], "notes": []},
}


def changed(part: str, **figures: Any) -> dict[str, Any]:
    found = deepcopy(RUN)
    found[part] |= figures
    return found


def with_read(endpoint: str, **figures: Any) -> dict[str, Any]:
    found = deepcopy(RUN)
    found["operations"][("grpc", "resp").index(endpoint)] |= figures
    return found


def fallen(document: dict[str, Any], stored: dict[str, Any] = RUN) -> list[str]:
    return [line.figure for line in compare(baseline_of(stored), document, Tolerance()).lines if line.is_fallen]


def test_same_run_is_not_worse() -> None:
    assert fallen(RUN) == []
    assert differences(baseline_of(RUN), RUN) == []
    assert compare(baseline_of(RUN), RUN, Tolerance()).notes == []


@pytest.mark.parametrize(("figure", "still", "no_more"), [("per_s", 281.0, 279.0), ("achieved", 0.71, 0.69)])
def test_each_rate_has_its_tolerance(figure: str, still: float, no_more: float) -> None:
    assert fallen(changed("total", **{figure: still})) == []
    assert fallen(changed("total", **{figure: no_more})) == [figure]


@pytest.mark.parametrize(
    ("endpoint", "figure", "still", "no_more"),
    [
        ("grpc", "per_s", 63.1, 62.9),
        ("grpc", "p50_ms", 7.9, 8.1),
        ("grpc", "p99_ms", 39.9, 40.1),
        ("resp", "p50_ms", 1.4, 1.6),
        ("resp", "p99_ms", 6.9, 7.1),
    ],
)
def test_each_operation_of_each_endpoint_is_judged_separately(
    endpoint: str, figure: str, still: float, no_more: float
) -> None:
    """Medians may rise by a millisecond in every case, tails by five."""
    assert fallen(with_read(endpoint, **{figure: still})) == []
    assert fallen(with_read(endpoint, **{figure: no_more})) == [f"{endpoint} read {figure}"]


def test_missing_operation_is_worse() -> None:
    gone = deepcopy(RUN)
    del gone["operations"][0]
    assert fallen(gone) == ["grpc read per_s"]


@pytest.mark.parametrize(("then", "now"), [(COUNT_MIN - 1, 9_000), (9_000, COUNT_MIN - 1)])
def test_rare_operation_is_shown_and_not_judged(then: int, now: int) -> None:
    compared = compare(
        baseline_of(with_read("grpc", count=then)), with_read("grpc", count=now, p99_ms=900), Tolerance()
    )
    (line,) = [each for each in compared.lines if each.figure == "grpc read p99_ms"]
    assert (line.now, line.is_fallen, line.row()[""]) == (900, False, "too few")


def test_better_run_is_not_worse() -> None:
    assert fallen(changed("total", per_s=900.0)) == []
    assert fallen(with_read("grpc", p50_ms=0.1, p99_ms=1.0)) == []


def test_slower_machine_excuses_equally_longer_latencies() -> None:
    slow = changed("machine", pulse_p50_ms=2.0, pulse_p95_ms=6.0)
    slow["operations"][0] |= {"p50_ms": 15.9, "p99_ms": 119.9}
    assert fallen(slow) == []
    slow["operations"][0] |= {"p50_ms": 16.1, "p99_ms": 120.1}
    assert fallen(slow) == ["grpc read p50_ms", "grpc read p99_ms"]


def test_slow_machine_excuses_at_most_three_times_as_much() -> None:
    slow = changed("machine", pulse_p50_ms=50.0)
    slow["operations"][0]["p50_ms"] = 24.1
    assert fallen(slow) == ["grpc read p50_ms"]
    (note,) = compare(baseline_of(RUN), slow, Tolerance()).notes
    assert note == "pulse_p50_ms is 50.00 times the baseline's, and is limited to 3 times"


def test_faster_machine_makes_no_unchanged_run_worse() -> None:
    quick = changed("machine", pulse_p50_ms=0.3, pulse_p95_ms=0.6)
    assert fallen(quick) == []
    assert len(compare(baseline_of(RUN), quick, Tolerance()).notes) == 2


def test_rate_falls_whatever_the_machine_does() -> None:
    slow = changed("machine", pulse_p50_ms=100.0, pulse_p95_ms=100.0)
    slow["total"]["per_s"] = 279.0
    assert fallen(slow) == ["per_s"]


def test_run_without_a_pulse_is_not_compared() -> None:
    (reason,) = differences(baseline_of(RUN), changed("machine", pulse_p50_ms=None))
    assert reason == "pulse_p50_ms was not measured"


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("options", name) for name in ("rate", "workload", "preload", "endpoints")),
        *(("options", name) for name in ("workers", "nodes", "partitions", "an_option_to_come")),
        ("machine", "cores"),
    ],
)
def test_another_run_or_machine_is_not_compared(part: str, name: str) -> None:
    (reason,) = differences(baseline_of(RUN), changed(part, **{name: 7}))
    assert reason.startswith(f"{name} was")
    (reason,) = differences(baseline_of(changed(part, **{name: 7})), RUN)
    assert reason.startswith(f"{name} was 7")


def test_runs_of_different_length_are_compared_only_at_a_steady_rate() -> None:
    """A short run was not judged against the stored one at all."""
    short = changed("options", seconds=30.0, warmup=3.0)
    assert differences(baseline_of(RUN), short) == []
    assert fallen(short | {"total": {"per_s": 100.0, "achieved": 1.0}}) == ["per_s"]
    stored = baseline_of(RUN) | {"made": RUN["options"]}  # as stored together with their length
    assert differences(stored, changed("options", seconds=30.0, report="y.html", seed=1) | {}) == []
    of_step = changed("options", shape="step")
    (reason,) = differences(baseline_of(of_step), changed("options", shape="step", seconds=30.0))
    assert reason == "seconds was 105.0 and is 30.0"


def test_spoiled_run_is_not_stored_and_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoiled = RUN | {
        "verdict": {"is_met": False, "reasons": [], "spoiled": ["the load generator was late"], "notes": []}
    }
    with pytest.raises(ValueError, match=r"spoiled.*the load generator was late"):
        baseline_of(spoiled)
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    baseline.write_text(json.dumps(baseline_of(RUN)))
    results.write_text(json.dumps(spoiled))
    assert run_compare(results, baseline, Tolerance()) == EXIT
    assert "the run was spoiled: the load generator was late" in capsys.readouterr().err


def test_where_the_report_goes_makes_no_difference() -> None:
    assert differences(baseline_of(RUN), changed("options", report="y.html", seed=2, errors_max=0.5)) == []


def test_command_exits_with_1_if_worse_and_2_if_it_cannot_compare(
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


def test_baseline_of_another_format_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    results.write_text(json.dumps(RUN))
    baseline.write_text('{"format": 2, "made": {}, "machine": {}, "figures": {}}')
    assert run_compare(results, baseline, Tolerance()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a baseline of format 4, got 2; store a new one" in line


@pytest.mark.parametrize("rate", [400.0, 9.0], ids=["alike", "not alike"])
def test_run_that_failed_does_not_pass_because_nothing_is_slower(
    rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    baseline.write_text(json.dumps(baseline_of(RUN)))
    failed = changed("verdict", is_met=False, reasons=["3 reads returned wrong values"])
    failed["options"]["rate"] = rate
    results.write_text(json.dumps(failed))
    assert run_compare(results, baseline, Tolerance()) == 1
    assert "the run failed: 3 reads returned wrong values" in capsys.readouterr().err


def test_run_that_failed_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    failed = changed("verdict", is_met=False, reasons=["3 reads returned wrong values", "kill -9 n1: no cluster"])
    results.write_text(json.dumps(failed))
    baseline.write_text("as it was")
    assert run_compare(results, baseline, Tolerance(), save=True) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 reads returned wrong values" in line
    assert baseline.read_text() == "as it was"


def test_run_with_an_unusable_baseline_can_become_the_next_one(tmp_path: Path) -> None:
    """An unreadable baseline is no fault of the run."""
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    results.write_text(json.dumps(changed("verdict", reasons=["cannot compare with the baseline"])))
    assert run_compare(results, baseline, Tolerance(), save=True) == 0
    assert run_compare(results, baseline, Tolerance()) == 0


@pytest.mark.parametrize(("per_s", "code"), [(400.0, 0), (250.0, 1)])
def test_command_line_has_the_usual_tolerance(tmp_path: Path, per_s: float, code: int) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    baseline.write_text(json.dumps(baseline_of(RUN)))
    results.write_text(json.dumps(changed("total", per_s=per_s)))
    with pytest.raises(SystemExit) as ended:
        main([str(results), str(baseline)])
    assert ended.value.code == code


@pytest.mark.parametrize("given", [30, -0.1, nan, inf])
@pytest.mark.parametrize("name", ["rate", "latency"])
def test_tolerance_that_lets_everything_pass_is_refused_in_one_line(
    name: str, given: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["results.json", "baseline.json", f"--{name}-tolerance={given}"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"got {given:g}" in line
