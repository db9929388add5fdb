"""Waits for the last reports of the workers at the end of a run. Decides only.

When a user stops, it reports the operations that were due and never began, and how long its last operation took.
Locust's master stops listening half a second after it sends its workers the order to quit, so users must stop before
that.
"""

from __future__ import annotations

REPORTS = 2
"""Number of reports to wait for. The next report after a worker's users have stopped is complete."""


class LastReports:
    """Asks for no users until all have stopped, or were killed after `stop_s`, and workers, which report every
    `report_s` seconds, have reported."""

    def __init__(self, now: float, running: int, *, stop_s: float, report_s: float) -> None:
        self._torn_at, self._reports_s = now + stop_s, REPORTS * report_s
        self._target = 0, float(max(1, running))  # all at once: a user that stops later continues to load
        self._stopped_at: float | None = None

    def target(self, now: float, running: int) -> tuple[int, float] | None:
        """Return the wanted number of users and how many to stop per second; None once all reports are in."""
        if self._stopped_at is None and (not running or now >= self._torn_at):
            self._stopped_at = now
        if self._stopped_at is not None and now >= self._stopped_at + self._reports_s:
            return None
        return self._target
