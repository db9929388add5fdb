"""The Clock port on the machine's own clocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path


class Unjudged:
    """A clock that trusts its own wall clock without confirmation. For processes that lead nothing, and for tests."""

    boot_id = ""

    def wall_ms(self) -> int:
        raise NotImplementedError

    def date_ms(self) -> int:
        return self.wall_ms()

    def shown_ms(self) -> int:
        return self.date_ms()

    def passed_ms(self) -> int:
        return self.wall_ms()

    def may_lead(self) -> bool:
        return True

    def has_date(self) -> bool:
        return True

    def on_date_judged(self, changed: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class SystemClock(Unjudged):
    """The machine's clocks: CLOCK_BOOTTIME for durations, because it continues while the machine is suspended, and
    the wall clock for people."""

    now = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))

    def __init__(self) -> None:
        self.boot_id = _boot_id()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


def _boot_id() -> str:
    """Return an id of the kernel's boot and of the time namespace, because a time namespace may shift
    CLOCK_BOOTTIME."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return ""
