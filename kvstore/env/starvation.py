"""Measures how long this process's event loop is ready to run and has no processor."""

from __future__ import annotations

import time
from contextlib import suppress

SAMPLE_S = 0.1
SCHEDSTAT = "/proc/thread-self/schedstat"


class LoopStarvation:
    """The starvation of the calling thread, which is the event loop's. It measures when it is called, at most every
    SAMPLE_S. If the kernel has no statistics, nothing is starved."""

    def __init__(self) -> None:
        self._at, self._waited = time.monotonic(), _waited(0.0)
        self._share = 0.0

    def __call__(self) -> float:
        """Return the share of the time between the last two measurements, from 0 to 1, in which the thread waited for a
        processor."""
        now = time.monotonic()
        passed = now - self._at
        if passed >= SAMPLE_S:
            waited = _waited(self._waited)
            self._share = min(1.0, max(0.0, (waited - self._waited) / passed))
            self._at, self._waited = now, waited
        return self._share


def _waited(unknown: float) -> float:
    """Return the seconds of waiting since the thread began."""
    with suppress(OSError, ValueError, IndexError), open(SCHEDSTAT, "rb") as file:
        return int(file.read().split()[1]) / 1e9  # nanoseconds on a processor, waited for one (Linux, sched-stats.rst)
    return unknown
