"""A lock that is never acquired any more is detected, though the others are still acquired."""

from __future__ import annotations

from loadtest.drills.contest import STUCK_S, Progress


def test_lock_is_stuck_whatever_the_others_do() -> None:
    """All locks were counted together: no drill reported a lock that was never acquired."""
    progress = Progress(100.0)
    assert progress.stuck({"a": 3, "b": 1}, 101.0) == []
    assert progress.stuck({"a": 4, "b": 1}, 100.9 + STUCK_S) == []
    assert progress.stuck({"a": 5, "b": 1}, 101.0 + STUCK_S) == ["b"]
    assert progress.stuck({"a": 5, "b": 2}, 102.0 + STUCK_S) == []


def test_lock_that_is_never_acquired_is_stuck() -> None:
    progress = Progress(100.0)
    assert progress.stuck({"a": 0}, 99.0 + STUCK_S) == []
    assert progress.stuck({"a": 0}, 100.0 + STUCK_S) == ["a"]
