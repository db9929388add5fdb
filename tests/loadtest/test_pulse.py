"""The pulse of the machine is measured beside a run, and ends with it."""

from __future__ import annotations

from pathlib import Path

from loadtest.pulse import Pulse, figures


def test_the_figures_are_quantiles_in_milliseconds() -> None:
    assert figures([number / 1000 for number in range(100, 0, -1)]) == {"pulse_p50_ms": 51.0, "pulse_p95_ms": 96.0}


def test_a_few_times_say_nothing() -> None:
    assert figures([0.001] * 9) == {}


def test_a_pulse_that_is_ended_at_once_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "reports")
    assert pulse.finish() == {}
    assert list((tmp_path / "reports").iterdir()) == []
