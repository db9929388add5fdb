"""The pulse of the machine is measured for a few seconds, and leaves no file."""

from __future__ import annotations

from pathlib import Path

from kvstore.loadtest.pulse import figures, measure


def test_figures_are_quantiles_in_milliseconds() -> None:
    assert figures([number / 1000 for number in range(100, 0, -1)]) == {"pulse_p50_ms": 51.0, "pulse_p95_ms": 96.0}


def test_few_samples_give_no_verdict() -> None:
    assert figures([0.001] * 9) == {}


def test_it_is_over_after_its_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, 3.0)  # ten syncs are enough: other processes may use the disk meanwhile
    assert 0 < found["pulse_p50_ms"] <= found["pulse_p95_ms"]
    assert list(tmp_path.iterdir()) == []


def test_pulse_that_is_too_short_gives_no_result_and_leaves_no_file(tmp_path: Path) -> None:
    assert measure(tmp_path, 0.0) == {}
    assert list(tmp_path.iterdir()) == []
