"""The Clock port on the machine's own clocks."""

from __future__ import annotations

import time


class SystemClock:
    """CLOCK_BOOTTIME for durations, because it goes on while the machine is suspended; the date for people."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
