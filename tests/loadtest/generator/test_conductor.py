"""The results of the users control the run, and the report shows whether its figures are usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.loadtest.generator import conductor as conducting
from kvstore.loadtest.generator.conductor import Conductor
from kvstore.loadtest.generator.options import Options
from kvstore.loadtest.report.baseline import baseline_of
from kvstore.loadtest.report.recorder import Recorder
from kvstore.loadtest.report.spoiled import EXIT

BEGAN = 1_000.0


class Clock:
    """Replaces the module `time`. A test advances it."""

    def __init__(self) -> None:
        self.now, self.used_s = BEGAN, 0.0

    def time(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("kvstore.loadtest.report.recorder.queued_or_none", lambda: None)  # the machine may be busy
    monkeypatch.setattr(conducting, "time", found)
    return found


def led(folder: Path, **options: Any) -> Conductor:
    settings: dict[str, Any] = {"rate": 100.0, "seconds": 600.0, "warmup": 0.0, **options}
    conductor = Conductor(Options(report=folder / "report.html", **settings), Recorder())
    conductor.start()
    return conductor


def seconds_of(conductor: Conductor, *ats: float, running: int, per_s: int = 100, busy: float = 0.1) -> list[int]:
    """Return the number of wanted users at each of `ats`, if `per_s` operations of 2 ms were done in each second
    before it."""
    clock = vars(conducting)["time"]
    wanted = []
    for at in ats:
        for number in range(per_s):
            begin = BEGAN + at - 1 + number / per_s
            conductor.recorder.done("grpc", "read", intended=begin, ended=begin + 0.002, service_s=0.002)
        clock.used_s += busy
        clock.now = BEGAN + at
        wanted.append((conductor.target(clock.now, running) or (0, 0.0))[0])
    return wanted


def finished(conductor: Conductor) -> tuple[int, dict[str, Any]]:
    code = conductor.finish(endpoints="GrpcUser")
    return code, json.loads(conductor.options.figures.read_text())


def whole_run(folder: Path, clock: Clock, *, busy: float = 0.1, **options: Any) -> tuple[int, dict[str, Any]]:
    """Ten seconds with the pulse of a fast machine."""
    clock.now, clock.used_s = BEGAN, 0.0
    conductor = led(folder, seconds=10.0, **options)
    conductor._pulse = {"pulse_p50_ms": 1.0, "pulse_p95_ms": 2.0}
    seconds_of(conductor, *range(1, 11), running=20, busy=busy)
    return finished(conductor)


def test_rate_is_judged_when_all_users_have_run_for_a_complete_trial(tmp_path: Path, clock: Clock) -> None:
    conductor = led(tmp_path, shape="knee")
    assert seconds_of(conductor, *range(1, 31), running=19) == [20] * 30
    assert seconds_of(conductor, *range(31, 45), running=20) == [20] * 14
    assert seconds_of(conductor, 45, running=20) == [30]


def test_rate_with_fewer_operations_than_due_is_not_carried(tmp_path: Path, clock: Clock) -> None:
    """101 per second need 21 users, which then have 105 due."""
    conductor = led(tmp_path, shape="knee", rate=101.0)
    seconds_of(conductor, *range(1, 20), running=21, per_s=102)
    (trial,) = conductor._shape.trials  # type: ignore[attr-defined]
    assert (trial.due_per_s, trial.done_per_s, trial.is_carried) == (105.0, 102.0, False)


@pytest.mark.usefixtures("clock")
def test_steady_rate_needs_no_recent_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the progress lines, one in ten seconds, look at them."""
    conductor, asked, between = led(tmp_path), [], Recorder.between
    monkeypatch.setattr(Recorder, "between", lambda *words: asked.append(words) or between(*words))
    assert seconds_of(conductor, *range(1, 30), running=20) == [20] * 29
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" of ")[0] for line in said] == ["loadtest: 10", "loadtest: 20"]
    assert len(asked) == 2


@pytest.mark.usefixtures("clock")
def test_knee_that_was_not_found_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conductor = led(tmp_path, shape="knee", seconds=20.0)
    seconds_of(conductor, *range(1, 21), running=20)
    code, made = finished(conductor)
    assert code == 1
    assert made["verdict"]["reasons"] == ["the knee was not found: the run ended while 100/s were still sustained"]
    said = capsys.readouterr().err
    assert "the knee was not found" in said
    assert "loadtest: the knee:" not in said


@pytest.mark.parametrize(("busy", "is_told"), [(0.95, True), (0.85, False)])
def test_saturated_generator_is_reported_and_fails_nothing(
    busy: float, *, is_told: bool, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    code, made = whole_run(tmp_path, clock, busy=busy)
    assert code == 0
    assert any("used 95% of a processor" in note for note in made["verdict"]["notes"]) == is_told
    assert ("generator is saturated" in capsys.readouterr().err) == is_told
    assert ("generator is saturated" in (tmp_path / "report.html").read_text()) == is_told


@pytest.mark.usefixtures("clock")
def test_knee_of_a_saturated_generator_may_be_its_own(tmp_path: Path) -> None:
    conductor = led(tmp_path, shape="knee")
    seconds_of(conductor, *range(1, 16), running=20, busy=0.99)
    seconds_of(conductor, *range(16, 32), running=30, busy=0.99)
    conductor.ended = BEGAN + 32
    _, made = finished(conductor)
    knee, saturated = made["verdict"]["notes"]
    assert knee == "the knee: 100/s were sustained, 150/s were not"
    assert "the knee may be the generator's" in saturated


def test_run_is_judged_by_its_baseline(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    _, made = whole_run(tmp_path, clock)
    stored = baseline_of(made)
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(stored))
    assert whole_run(tmp_path, clock, baseline=path)[0] == 0
    stored["figures"]["per_s"] = 1_000.0
    path.write_text(json.dumps(stored))
    code, made = whole_run(tmp_path, clock, baseline=path)
    assert code == 1
    assert made["verdict"]["reasons"] == ["per_s got worse: 100, baseline 1000, limit 700"]
    assert made["verdict"]["is_met"], "the run itself was as it must be"
    assert "✗ per_s got worse" in (tmp_path / "report.html").read_text()
    whole_run(tmp_path, clock, baseline=path, keys=7)
    assert "not compared with" in capsys.readouterr().err


def test_run_spoiled_by_its_own_machine_has_its_own_exit_code(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures against the store are ignored: they do not measure the store."""
    _, made = whole_run(tmp_path, clock)
    stored = baseline_of(made)
    stored["figures"]["per_s"] = 1_000.0
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(stored))
    looks = iter(range(1_000))
    monkeypatch.setattr("kvstore.loadtest.report.recorder.queued_or_none", lambda: next(looks) * 0.5)
    code, made = whole_run(tmp_path, clock, baseline=path, p99_ms="1")
    assert code == EXIT == 3
    verdict = made["verdict"]
    assert (verdict["is_met"], verdict["reasons"]) == (False, [])
    assert verdict["spoiled"] == [
        "the load generator starved: it was runnable but waited for a processor 50% of the time; the limit is 25%"
    ]
    assert [note.partition(": ")[0] for note in verdict["notes"]] == ["not judged because the run was spoiled"] * 2
    assert "loadtest: SPOILED: the load generator starved" in capsys.readouterr().err
    assert "Spoiled, says nothing about the store" in (tmp_path / "report.html").read_text()
    code, made = whole_run(tmp_path, clock, shape="knee")
    assert any("starved" in note for note in made["verdict"]["notes"]), "a knee overloads everything"


@pytest.mark.parametrize(
    ("part", "message"),
    [("figures", "'figures' is missing"), ("operations", "'operations' is missing"), ("", "format 4")],
)
def test_incomplete_baseline_does_not_prevent_the_report(
    part: str, message: str, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    _, made = whole_run(tmp_path, clock)
    stored = baseline_of(made)
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({key: value for key, value in stored.items() if key != part} if part else {"format": 2}))
    (tmp_path / "report.html").unlink()
    code, made = whole_run(tmp_path, clock, baseline=path)
    assert code == 1
    assert message in made["verdict"]["reasons"][0]
    assert made["verdict"]["is_met"], "the next baseline can be made of it"
    assert message.replace("'", "&#x27;") in (tmp_path / "report.html").read_text()
    assert len([line for line in capsys.readouterr().err.splitlines() if message in line]) == 1


def test_document_contains_the_options_of_the_load(tmp_path: Path, clock: Clock) -> None:
    options = whole_run(tmp_path, clock)[1]["options"]
    assert (options["workers"], options["nodes"], options["partitions"]) == (0, None, None)


def test_pulse_is_taken_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps the machine busy must not be excused by it."""
    done: list[str] = []

    def measure(folder: Path) -> dict[str, float]:
        done.append(f"pulse in {folder.name}")
        return {}

    monkeypatch.setattr("kvstore.loadtest.pulse.measure", measure)
    monkeypatch.setattr(
        "kvstore.loadtest.generator.resp_wire.load_records", lambda node, records: done.append("records")
    )
    options = Options(report=tmp_path / "reports" / "r.html", resp="localhost:1", keys=5)
    Conductor(options, Recorder()).load_records(1)
    assert done == ["pulse in reports", "records"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"baseline": Path("nosuch.json")}, "nosuch.json"),
        ({"report": Path("/dev/null/r.html")}, "cannot write /dev/null/r.html"),
    ],
)
def test_unreadable_and_unwritable_paths_are_refused_before_the_run(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Conductor(Options(**{"report": tmp_path / "r.html", **given}), Recorder())


@pytest.mark.usefixtures("clock")
def test_users_that_catch_up_do_not_hide_what_is_still_undone(tmp_path: Path) -> None:
    """The users do as much as is due per second, but operations that were due long ago."""
    conductor = led(tmp_path, shape="knee")
    for second in range(20):
        for _ in range(40):
            ended = BEGAN + second
            conductor.recorder.done("grpc", "read", intended=BEGAN, ended=ended, service_s=0.001)
    seconds_of(conductor, *range(1, 20), running=20, per_s=60)
    (trial,) = conductor._shape.trials  # type: ignore[attr-defined]
    assert (trial.done_per_s, trial.is_carried) == (60.0, False)
