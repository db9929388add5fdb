"""Decides how long a leader waits for more operations before it sends the next entry. Decides only.

An entry costs each replica about as much as ten operations. While processors are idle, the leader sends each entry at
once. While work waits for a processor, the leader delays small entries; the longer entries take, the longer it delays
them. The result is fewer and larger entries, which leave processor time for other work. Operations save more time there
than the delay costs them.

The delay ends once as many operations are queued as after the last full delay, because no other caller is known.
Operations of small entries in flight do not count. Otherwise the callers of a partition would form two groups, each of
which leaves while the other one is in flight, and their entries would hold half as many operations. While a partition
is pinned, a client reads all of it with the remaining processor time, so delays are as long as allowed
(docs/design/0006-batching-delay.md).
"""

from __future__ import annotations

DELAY_MAX_S = 0.012
ENTRY_INTERVAL = 6.0
"""The time between the starts of two entries, as a multiple of the time that an entry takes."""
STARVED_FROM, STARVED_FULL = 0.1, 0.25
"""Shares of time in which the event loop gets no processor. The leader delays entries from the first share on, and
delays them in full from the second on."""
ENOUGH_ITEMS, ENOUGH_BYTES = 64, 64 << 10
"""An entry of this many operations or bytes leaves without a delay."""
CUT_SHORT_MAX = 16
"""Number of delays that end early before the next full delay, which shows whether there are more callers by now."""
TICK_S = 0.001
"""The resolution of the event loop's timers. A shorter wait would use up turns without end."""
SMOOTHING = 1 / 16
"""The weight of one entry in the moving mean of the time that entries take."""


class BatchDelay:
    """The batching delay of one leader. All times are in seconds of the same clock."""

    def __init__(self) -> None:
        self.last_took = -1.0
        """Seconds from the send of the last entry to its acknowledgement; below 0 once they are in the mean."""
        self._took = 0.0
        self.ends = 0.0
        """Until this time, few operations wait for more."""
        self._has_held = False
        self._expected = 0
        """Number of operations for which a delay waits. It rises to the number that the last full delay has gathered,
        and falls towards a lower number by a quarter of the difference, because callers of several partitions come in
        varying numbers."""
        self._cut_short = CUT_SHORT_MAX
        """Number of delays that have ended early since the last full delay."""

    def begin(self, now: float, items: int, in_flight: int, starved: float, *, is_pinned: bool = False) -> None:
        """Record that an entry of `items` operations is sent, while `in_flight` others are not acknowledged yet.
        `starved` is the fraction of time in which the event loop waits for a processor."""
        if self.last_took >= 0.0:
            self._took += (self.last_took - self._took) * SMOOTHING
            self.last_took = -1.0
        if self._has_held and now > self.ends - TICK_S:
            present = _present(items, in_flight)
            self._expected = max(present, self._expected - (self._expected - present + 3) // 4)
            self._cut_short = 0
        self._has_held = False
        if starved <= STARVED_FROM:
            self.ends = now
            return
        part = min(1.0, (starved - STARVED_FROM) / (STARVED_FULL - STARVED_FROM))
        self.ends = now + part * (DELAY_MAX_S if is_pinned else min(DELAY_MAX_S, ENTRY_INTERVAL * self._took))

    def end(self) -> None:
        """End the delay at once, because a caller waits for the next entry."""
        self.ends = 0.0
        self._has_held = False

    def left(self, now: float, items: int, size: int, in_flight: int) -> float:
        """Return how many more seconds the queued operations should wait; 0 if they should be sent now. `items` and
        `size` are the number and bytes of the queued operations. `in_flight` is the number of operations in entries
        that are not acknowledged yet."""
        left = min(self.ends - now, DELAY_MAX_S)
        if left < TICK_S or items >= ENOUGH_ITEMS or size >= ENOUGH_BYTES:
            return 0.0
        if (present := _present(items, in_flight)) >= self._expected and self._cut_short < CUT_SHORT_MAX:
            self._cut_short += 1
            self._expected = present
            return 0.0
        self._has_held = True
        return left


def _present(items: int, in_flight: int) -> int:
    """Return how many operations are here. Those in flight count only if they are many: their entries are large enough,
    and the disks would be idle if the next one waited for them."""
    return items + (in_flight if in_flight >= ENOUGH_ITEMS else 0)
