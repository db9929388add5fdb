"""How long a leader lets operations gather before its next entry. Decides only.

An entry costs each replica about as much as ten operations. Where there are processors to spare, what has arrived
leaves at once. Where work waits for a processor, a small entry follows later, the longer entries take. There are fewer
and larger ones then: others get the processors, and operations wait less for these than they wait here
(docs/design/0006-rests-between-entries.md).
"""

from __future__ import annotations

REST_MAX_S = 0.012
RESTS, QUICK_S = 3.0, 0.001
"""From the begin of one entry to that of the next: so many times what entries take beyond QUICK_S. A caller who sends
one operation after the other so waits for nobody's."""
BUSY_FROM, BUSY_FULL = 0.3, 0.6
"""Shares of time in which the event loop has work; from the first on a leader rests, from the second on in full."""
ENOUGH_ITEMS, ENOUGH_BYTES = 64, 64 << 10
"""An entry of so much waits for nothing."""
TICK_S = 0.001
"""Of the event loop's timers. What is shorter would be waited for in turns without end."""
SMOOTHING = 1 / 16
"""What one entry adds to the mean of what entries take."""


class Rest:
    """One leader's. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._took = 0.0
        self._ends = 0.0

    def begin(self, now: float, busy: float) -> None:
        """An entry leaves; `busy` is the share of time in which the event loop has work."""
        part = min(1.0, max(0.0, (busy - BUSY_FROM) / (BUSY_FULL - BUSY_FROM)))
        self._ends = now + part * min(REST_MAX_S, RESTS * max(0.0, self._took - QUICK_S))

    def acknowledged(self, took: float) -> None:
        """So long after it left."""
        self._took += (took - self._took) * SMOOTHING

    def left(self, now: float, items: int, size: int) -> float:
        """How much longer so many operations, of so many bytes, are to wait; 0 if they are to leave."""
        if items >= ENOUGH_ITEMS or size >= ENOUGH_BYTES:
            return 0.0
        left = min(self._ends - now, REST_MAX_S)
        return left if left >= TICK_S else 0.0
