"""Computes the time of a leader's next record (docs/protocol.md, P4 and P30)."""

from __future__ import annotations

from kvstore.env import Clock
from kvstore.partition.state.state import ReplicaState

AHEAD_RATE = 0.9
"""Speed of record time while it is ahead of the server's time: a lead of one hour is gone within ten hours, and a time
to live granted meanwhile lasts a ninth longer."""


class RecordTime:
    """The record time of one leadership. Decides only."""

    def __init__(self, last_ms: int, now: float) -> None:
        """`last_ms` is the time of the last record in the log, in ms."""
        self._ms, self._at = float(last_ms), now

    def at(self, now: float, date_ms: int, last_ms: int) -> int:
        """Return the server's time, but never earlier than before. While record time is ahead, as in a log that a wrong
        clock has written to, it still advances: otherwise keys with a time to live would stay until the server's time
        has caught up."""
        passed = now - self._at
        ms = self._ms + passed * 1000 * AHEAD_RATE if passed > 0 else self._ms
        for least in (last_ms, date_ms):
            if least > ms:
                ms = least
        self._ms, self._at = ms, now
        return int(ms)


class LeaderClock:
    """The clock of one leadership. Its date is the time that a record created now would have."""

    def __init__(self, clock: Clock, state: ReplicaState) -> None:
        self.now, self.wall_ms, self.passed_ms = clock.now, clock.wall_ms, clock.passed_ms
        self.may_lead, self.has_date, self.on_date_judged = clock.may_lead, clock.has_date, clock.on_date_judged
        self.shown_ms, self.boot_id = clock.shown_ms, clock.boot_id
        self._clock, self._state = clock, state
        self._time = RecordTime(state.record_time_ms, clock.now())

    def date_ms(self) -> int:
        return self._time.at(self.now(), self._clock.date_ms(), self._state.record_time_ms)
