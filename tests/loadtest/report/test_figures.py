"""The document shows all measurements, and the verdict fails every unacceptable run."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.loadtest.report.figures import Event, Run, document
from kvstore.loadtest.report.goals import Goals
from kvstore.loadtest.report.recorder import Recorder

BEGAN = 1_000.0


def run(**more: Any) -> Run:
    settings: dict[str, Any] = {"options": {}, "machine": {}, "goals": Goals(), **more}
    return Run(began=BEGAN, ended=BEGAN + 20, counted_from=BEGAN + 5, **settings)


def measured(*, down: range = range(0), errors: int = 0) -> Recorder:
    """20 s of ten operations per second that take 2 ms; those due in seconds of `down` end when these are over."""
    recorder = Recorder(counted_from=BEGAN + 5)
    for number in range(200):
        intended = BEGAN + number / 10
        ended = BEGAN + down.stop if int(number / 10) in down else intended + 0.002
        if number % 20 < errors:
            recorder.failed("grpc", "read", "Unavailable", intended=intended, ended=ended)
        else:
            recorder.done("grpc", "read", intended=intended, ended=ended, service_s=0.002, length=100)
    return recorder


def test_tables_begin_after_the_warm_up_and_the_timeline_with_the_run() -> None:
    made = document(measured(), run())
    (line,) = made["operations"]
    assert (line["count"], line["per_s"], line["p50_ms"]) == (150, 10.0, pytest.approx(2.0, rel=0.01))
    assert made["total"]["per_s"] == made["total"]["due_per_s"] == 10.0
    assert made["total"]["done"] == 200
    assert [point["done"] for point in made["timeline"]] == [10] * 20 + [0]
    assert made["verdict"] == {"is_met": True, "reasons": [], "spoiled": [], "notes": []}


def test_times_of_the_whole_run_have_three_digits() -> None:
    recorder = Recorder(counted_from=BEGAN)
    for _ in range(100):
        recorder.done("resp", "read", intended=BEGAN + 5, ended=BEGAN + 5.5, service_s=0.0098)
    assert document(recorder, run())["total"]["service_p50_ms"] == pytest.approx(9.8, rel=0.001)


def test_wrong_value_fails_the_run_whatever_the_goals() -> None:
    recorder = measured()
    recorder.is_wrong("b'key' holds another's value")
    made = document(recorder, run(goals=Goals(errors_max=1.0)))
    assert made["verdict"]["is_met"] is False
    assert "1 reads returned wrong values" in made["verdict"]["reasons"]
    assert made["wrong"] == ["b'key' holds another's value"]


def test_more_errors_than_allowed_fail_the_run() -> None:
    recorder = measured(errors=1)
    assert document(recorder, run(goals=Goals(errors_max=0.05)))["verdict"]["is_met"]
    (reason,) = document(recorder, run(goals=Goals(errors_max=0.04)))["verdict"]["reasons"]
    assert "5.00% of the operations failed" in reason


def test_operations_that_were_due_and_never_done_count_against_the_rate() -> None:
    recorder = measured()
    recorder.abandoned(BEGAN + 10 + number / 10 for number in range(10))
    made = document(recorder, run(goals=Goals(achieved_min=0.99)))
    assert made["total"]["achieved"] == pytest.approx(150 / 160, abs=1e-4)
    assert "93.75% of the due operations were done" in made["verdict"]["reasons"][0]


def test_goal_for_p99_is_not_met_by_those_alone_that_were_done() -> None:
    """The store stopped for the second half, no caller received an answer then, and p99 was 2 ms."""
    recorder = measured()
    recorder.abandoned(BEGAN + 10 + number / 10 for number in range(100))
    assert document(recorder, run())["verdict"]["is_met"]
    (reason,) = document(recorder, run(goals=Goals(p99_ms={"": 50.0})))["verdict"]["reasons"]
    assert "60.00% of the due operations were done, and the missing ones are in no percentile" in reason


def test_event_after_the_run_affected_no_caller() -> None:
    """The document showed no operation in its second."""
    events = [Event(BEGAN + 25, "remove partition p7", "done after 9.0 s", ended=BEGAN + 34)]
    (event,) = document(measured(), run(events=events))["events"]
    assert (event["watched_s"], event["disturbed_s"], event["least_done"], event["max_ms"]) == (0, 0, None, None)


def test_run_without_operations_fails() -> None:
    assert document(Recorder(), run())["verdict"]["reasons"] == ["no operation was done"]


def test_failed_event_and_a_broken_user_fail_the_run() -> None:
    events = [
        Event(BEGAN + 9, "add a partition", "exit code 1", is_failed=True),
        Event(BEGAN + 9, "snapshot", "skipped"),
    ]
    reasons = document(measured(), run(events=events, faults=["a user broke"]))["verdict"]["reasons"]
    assert reasons == ["add a partition: exit code 1", "a user broke"]


def test_note_fails_nothing() -> None:
    verdict = document(measured(), run(notes=["the load generator is saturated"]))["verdict"]
    assert verdict == {"is_met": True, "reasons": [], "spoiled": [], "notes": ["the load generator is saturated"]}


def late(recorder: Recorder, *, late_s: float, took_s: float = 0.187) -> Recorder:
    for number in range(150):
        intended = BEGAN + 5 + number / 10
        recorder.done(
            "resp", "read", intended=intended, ended=intended + took_s, service_s=took_s - late_s, late_s=late_s
        )
    return recorder


def test_run_whose_generator_was_late_is_neither_good_nor_bad() -> None:
    """p99 of 187 ms passed: the generator had a quarter of a processor, and its processor wait was not measured."""
    made = document(late(measured(), late_s=0.12), run(goals=Goals(p99_ms={"": 50.0}, achieved_min=1.0)))
    verdict = made["verdict"]
    assert (verdict["is_met"], verdict["reasons"]) == (False, [])
    assert "the load generator was late: 1 % of the requests were sent 120" in verdict["spoiled"][0]
    (note,) = verdict["notes"]
    assert note.startswith("not judged because the run was spoiled: resp read: p99 is 187")


def test_wrong_value_fails_a_spoiled_run_too() -> None:
    recorder = late(measured(), late_s=0.12)
    recorder.is_wrong("b'key' holds another's value")
    verdict = document(recorder, run())["verdict"]
    assert (len(verdict["spoiled"]), verdict["reasons"]) == (1, ["1 reads returned wrong values"])


def test_where_everything_is_overloaded_on_purpose_lateness_is_a_note() -> None:
    verdict = document(late(measured(), late_s=0.12), run(is_spoilable=False))["verdict"]
    assert (verdict["is_met"], verdict["spoiled"], len(verdict["notes"])) == (True, [], 1)


def test_slow_store_misses_its_goal_and_spoils_nothing() -> None:
    """p99 of 700 ms passed without a message."""
    recorder = late(measured(), late_s=0.003, took_s=0.7)
    verdict = document(recorder, run(goals=Goals(p99_ms={"read": 250.0})))["verdict"]
    assert verdict["spoiled"] == []
    assert verdict["reasons"] == ["resp read: p99 is 700.415 ms; the goal is 250 ms"]
    assert document(recorder, run())["verdict"]["is_met"]


def test_event_shows_the_results_of_callers_until_the_next_one() -> None:
    kill, start = Event(BEGAN + 10, "kill -9 n1"), Event(BEGAN + 16, "start n1", ended=BEGAN + 18)
    made = document(measured(down=range(10, 13)), run(events=[start, kill]))
    first, second = made["events"]
    assert (first["what"], first["at_s"], first["watched_s"], first["disturbed_s"]) == ("kill -9 n1", 10.0, 6, 3)
    assert first["least_done"] == 0
    assert first["max_ms"] == pytest.approx(3_000, rel=0.02)
    assert (second["disturbed_s"], second["ended_s"]) == (0, 18.0)
