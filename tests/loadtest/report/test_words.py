"""Numbers and verdicts of load tests as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.loadtest.report.words import last_line, progress, two_digits


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (248.3, "250"),
        (12.349, "12"),
        (9.96, "10"),
        (1.04, "1.0"),
        (0.0996, "0.10"),
        (0.873, "0.87"),
        (0.000123, "0.00012"),
        (99.6, "100"),
        (12_345.6, "12,000"),
        (-3.14, "-3.1"),
    ],
)
def test_measured_numbers_have_two_significant_digits(value: float, shown: str) -> None:
    assert two_digits(value) == shown


def test_progress_says_how_far_the_run_is_and_what_it_does() -> None:
    seen = {"done_per_s": 248.3, "due_per_s": 250.0, "p50_ms": 8.123, "p99_ms": 43.9, "errors": 2}
    expected = "loadtest: 20 of 105 s: 250/s of 250/s due, p50 8.1 ms, p99 44 ms, 2 errors"
    assert progress(20.2, 105, 10, seen) == expected
    assert progress(9.9, 105, 10, seen).startswith("loadtest: 10 of 105 s (warm-up): ")
    late = seen | {"p50_ms": 0.0, "p99_ms": 0.0}
    assert progress(30, 105, 10, late).endswith("of 250/s due, no operation that was due has ended, 2 errors")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ({}, "PASSED: 250/s, p99 44 ms, 0 errors; report in r.html"),
        ({"reasons": ["a"]}, "FAILED: a; report in r.html"),
        ({"reasons": ["a", "b", "c"], "spoiled": ["d"]}, "FAILED: a (and 2 more reasons); report in r.html"),
        ({"spoiled": ["late"]}, "SPOILED, says nothing about the store: late; report in r.html"),
    ],
)
def test_verdict_is_one_line(verdict: dict[str, Any], expected: str) -> None:
    made = {
        "total": {"per_s": 248.3, "p99_ms": 43.9, "errors": 0},
        "verdict": {"reasons": [], "spoiled": [], "notes": []} | verdict,
    }
    assert last_line(made, "r.html") == f"loadtest: {expected}"
