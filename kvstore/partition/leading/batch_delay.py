"""How long a leader lets operations gather before its next entry. Decides only.

An entry costs each replica about as much as ten operations. Where there are processors to spare, what has arrived
leaves at once. Where work waits for a processor, a small entry follows later, the longer entries take. There are fewer
and larger ones then: others get the processors, and operations wait less for these than they wait here. While a
partition is pinned somebody reads all of it, on the processors that are left to that: rests are as long as they may be
then (docs/design/0006-rests-between-entries.md).
"""

from __future__ import annotations

REST_MAX_S = 0.012
RESTS, QUICK_S = 3.0, 0.001
"""From the begin of one entry to that of the next: so many times what entries take beyond QUICK_S."""
STARVED_FROM, STARVED_FULL = 0.1, 0.25
"""Shares of time in which the event loop gets no processor; from the first on a leader rests, from the second on in
full."""
ENOUGH_ITEMS, ENOUGH_BYTES = 64, 64 << 10
"""An entry of so much waits for nothing."""
IN_VAIN = 8
"""Rests that are left out after one in which nothing gathered: who waits for each answer is hardly slowed down."""
TICK_S = 0.001
"""Of the event loop's timers. What is shorter would be waited for in turns without end."""
SMOOTHING = 1 / 16
"""What one entry adds to the mean of what entries take."""


class BatchDelay:
    """One leader's. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.last_took = -1.0
        """How long after it left the last entry was acknowledged; below 0 once that is counted."""
        self._took = 0.0
        self.ends = 0.0
        """Until then operations are to wait, if they are few."""
        self._has_held = False
        self._left_out = 0

    def begin(self, now: float, items: int, starved: float, *, is_pinned: bool = False) -> None:
        """An entry of so many operations leaves; `starved` is the share of time in which the loop gets no processor."""
        if self.last_took >= 0.0:
            self._took += (self.last_took - self._took) * SMOOTHING
            self.last_took = -1.0
        if self._has_held and items == 1:
            self._left_out = IN_VAIN
        self._has_held = False
        self.ends = 0.0
        if self._left_out:
            self._left_out -= 1
            return
        part = min(1.0, max(0.0, (starved - STARVED_FROM) / (STARVED_FULL - STARVED_FROM)))
        self.ends = now + part * (REST_MAX_S if is_pinned else min(REST_MAX_S, RESTS * max(0.0, self._took - QUICK_S)))

    def end(self) -> None:
        """Somebody waits for the next entry."""
        self.ends = 0.0

    def left(self, now: float, items: int, size: int) -> float:
        """How much longer so many operations, of so many bytes, are to wait; 0 if they are to leave."""
        left = min(self.ends - now, REST_MAX_S)
        if left < TICK_S or items >= ENOUGH_ITEMS or size >= ENOUGH_BYTES:
            return 0.0
        self._has_held = True
        return left
