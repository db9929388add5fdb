"""How long a leader lets operations gather before its next entry. Decides only.

An entry costs each replica about as much as ten operations. Where there are processors to spare, what has arrived
leaves at once. Where work waits for a processor, a small entry follows later, the longer entries take. There are fewer
and larger ones then: others get the processors, and operations wait less for these than they wait here. A rest ends as
soon as as many operations are here as when the last whole one was over: their callers wait for answers now, and nobody
else is known to come. While a partition is pinned somebody reads all of it, on the processors that are left to that:
rests are as long as they may be then (docs/design/0006-batching-delay.md).
"""

from __future__ import annotations

REST_MAX_S = 0.012
RESTS = 6.0
"""The time from the begin of one entry to that of the next: so many times what entries take."""
STARVED_FROM, STARVED_FULL = 0.1, 0.25
"""Shares of time in which the event loop gets no processor; from the first on a leader rests, from the second on in
full."""
ENOUGH_ITEMS, ENOUGH_BYTES = 64, 64 << 10
"""An entry of so much waits for nothing."""
CUT_SHORT_MAX = 16
"""Rests that end early before there is a whole one again, to see whether there are more callers by now."""
TICK_S = 0.001
"""The resolution of the event loop's timers. To wait for less would take turns without end."""
SMOOTHING = 1 / 16
"""What one entry adds to the mean of what entries take."""


class BatchDelay:
    """The delay of one leader's batches. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.last_took = -1.0
        """How long after it left the last entry was acknowledged; below 0 once that is counted."""
        self._took = 0.0
        self.ends = 0.0
        """Until then operations are to wait, if they are few."""
        self._has_held = False
        self._expected = 0
        """Operations that were here, waiting or in entries under way, when the last whole rest was over."""
        self._cut_short = CUT_SHORT_MAX
        """Rests that have ended early since then."""

    def begin(self, now: float, here: int, starved: float, *, is_pinned: bool = False) -> None:
        """An entry leaves; `here` counts its operations and those of the entries under way, `starved` is the share of
        time in which the loop gets no processor."""
        if self.last_took >= 0.0:
            self._took += (self.last_took - self._took) * SMOOTHING
            self.last_took = -1.0
        if self._has_held and now > self.ends - TICK_S:
            self._expected, self._cut_short = here, 0
        self._has_held = False
        if starved <= STARVED_FROM:
            self.ends = now
            return
        part = min(1.0, (starved - STARVED_FROM) / (STARVED_FULL - STARVED_FROM))
        self.ends = now + part * (REST_MAX_S if is_pinned else min(REST_MAX_S, RESTS * self._took))

    def end(self) -> None:
        """End the rest: the next entry is waited for."""
        self.ends = 0.0
        self._has_held = False

    def left(self, now: float, items: int, size: int, under_way: int) -> float:
        """How much longer so many operations, of so many bytes, are to wait; 0 if they are to leave. `under_way` counts
        the operations in entries that are not acknowledged yet."""
        left = min(self.ends - now, REST_MAX_S)
        if left < TICK_S or items >= ENOUGH_ITEMS or size >= ENOUGH_BYTES:
            return 0.0
        if items + under_way >= self._expected and self._cut_short < CUT_SHORT_MAX:
            self._cut_short += 1
            return 0.0
        self._has_held = True
        return left
