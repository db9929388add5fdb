"""A run that its own machine has spoiled is told from one that a slow store has made slow."""

from __future__ import annotations

import pytest

from kvstore.loadtest.report.spoiled import spoils


def total(*, p99_ms: float, late_p99_ms: float) -> dict[str, float]:
    return {"p99_ms": p99_ms, "late_p99_ms": late_p99_ms}


@pytest.mark.parametrize(
    ("p99_ms", "late_p99_ms", "queued", "words"),
    [
        (187.0, 120.0, 0.05, ["was late"]),
        (187.0, 120.0, 0.60, ["was late", "starved"]),
        (187.0, 3.0, 0.60, ["starved"]),
        (187.0, 120.0, None, ["was late"]),
        (700.0, 20.0, 0.02, []),
        (700.0, 139.0, 0.25, []),
        (700.0, 141.0, 0.25, ["was late"]),
        (12.0, 4.9, 0.10, []),
        (12.0, 5.1, 0.10, ["was late"]),
        (2.0, 0.3, None, []),
    ],
)
def test_late_requests_spoil_a_run_and_a_slow_store_does_not(
    p99_ms: float, late_p99_ms: float, queued: float | None, words: list[str]
) -> None:
    found = spoils(total(p99_ms=p99_ms, late_p99_ms=late_p99_ms), queued)
    assert len(found) == len(words)
    assert all(word in told for word, told in zip(words, found, strict=True))
