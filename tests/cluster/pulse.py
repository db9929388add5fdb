"""Measures how late this machine wakes processes, so that a limit in seconds also holds on a busy machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.beside import beside

PERIOD_S = 0.01
LATE_TIMES = 6
"""Factor for a takeover: it takes about ten steps in several processes, and each step may be as late as the pulse."""


class Pulse:
    """Records how late a thread wakes that should wake every PERIOD_S."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []

    def run(self, over: threading.Event) -> None:
        due = time.monotonic() + PERIOD_S
        while not over.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self._late.append((now, now - due))
            due = now + PERIOD_S

    def check(self, gap: tuple[float, float], max_s: float, what: str) -> None:
        """Raise AssertionError if the time between the two moments is longer than `max_s`, by more than this machine
        was late in that time."""
        began, ended = gap
        late_s = sum(late for at, late in self._late if began <= at <= ended)
        assert ended - began < max_s + LATE_TIMES * late_s, f"{what}, on a machine that was {late_s:.3f} s late"


@contextmanager
def pulsing() -> Iterator[Pulse]:
    pulse = Pulse()
    with beside(pulse.run):
        yield pulse
