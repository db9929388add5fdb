"""A run with workers ends when their last reports have arrived."""

from __future__ import annotations

from kvstore.loadtest.generator.last_reports import LastReports


def test_users_are_stopped_and_their_reports_are_awaited() -> None:
    reports = LastReports(100.0, 250, stop_s=10, report_s=1)
    wanted = [reports.target(100.0 + second, running) for second, running in enumerate((250, 250, 3, 0, 0, 0))]
    assert wanted == [(0, 250.0)] * 5 + [None]


def test_constant_shape_does_not_change() -> None:
    """Any other message is a new order to the workers, which then restart their wait."""
    reports = LastReports(100.0, 250, stop_s=10, report_s=1)
    assert {reports.target(100.0 + second, 250 - second) for second in range(10)} == {(0, 250.0)}


def test_users_that_do_not_stop_are_killed_after_a_wait() -> None:
    reports = LastReports(100.0, 5, stop_s=10, report_s=1)
    assert reports.target(111.0, 5) == (0, 5.0)
    assert reports.target(112.9, 5) == (0, 5.0)
    assert reports.target(113.0, 5) is None


def test_where_no_user_runs_only_reports_are_waited_for() -> None:
    reports = LastReports(100.0, 0, stop_s=10, report_s=1)
    assert reports.target(100.0, 0) == (0, 1.0)
    assert reports.target(102.0, 0) is None
