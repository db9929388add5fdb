"""The end of a run with workers: when their last reports are in. Decides only.

What a user was due to do and never began is known when it stops, and so is how long its last operation took. Locust's
master stops listening half a second after it has told its workers to quit, so they must have stopped before that.
"""

from __future__ import annotations

REPORTS = 2
"""After its users have stopped, a worker's next report has it all; this many are waited for."""


class LastReports:
    """Wants no users until all of them have stopped, or were torn away after `stop_s`, and workers have reported it
    every `report_s` seconds."""

    def __init__(self, now: float, running: int, *, stop_s: float, report_s: float) -> None:
        self._torn_at, self._reports_s = now + stop_s, REPORTS * report_s
        self._target = 0, float(max(1, running))  # all at once: who stops later goes on loading
        self._stopped_at: float | None = None

    def target(self, now: float, running: int) -> tuple[int, float] | None:
        """How many users there should be, and how many to stop per second; None: all is told."""
        if self._stopped_at is None and (not running or now >= self._torn_at):
            self._stopped_at = now
        if self._stopped_at is not None and now >= self._stopped_at + self._reports_s:
            return None
        return self._target
