"""How busy this process' event loop is: whether work waits for a processor."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

SAMPLE_S = 0.1
SCHEDSTAT = "/proc/thread-self/schedstat"


class _Sample(NamedTuple):
    at: float
    ran: float
    waited: float


class LoopBusyness:
    """Of the thread that calls it: that of the event loop. It looks when it is asked, at most every SAMPLE_S.

    To run and to wait for a processor both count: three processes that share two processors run for two thirds of
    the time each and are busy all of it. Where the kernel does not tell how long threads wait, only running counts.
    """

    def __init__(self) -> None:
        self._last = _look(time.monotonic())
        self._share = 0.0

    def __call__(self) -> float:
        """The share of the time between the last two looks, from 0 to 1, in which the thread ran or waited for a
        processor."""
        now = time.monotonic()
        last = self._last
        passed = now - last.at
        if passed >= SAMPLE_S:
            self._last = found = _look(now)
            self._share = min(1.0, (found.ran - last.ran + found.waited - last.waited) / passed)
        return self._share


def _look(now: float) -> _Sample:
    waited = 0
    with suppress(OSError), open(SCHEDSTAT, "rb") as file:
        waited = int(file.read().split()[1])  # nanoseconds: on a processor, waited for one (Linux, sched-stats.rst)
    return _Sample(now, time.thread_time(), waited / 1e9)
