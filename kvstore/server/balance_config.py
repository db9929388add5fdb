"""The settings of the balancer. Decides only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from kvstore.ranges import WrongSettings, between, range_faults

MOVES_MAX = 240
DAY_MIN = 24 * 60
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class BalanceMode(StrEnum):
    """The use that the balancer makes of the steps that it finds."""

    OFF = "off"
    """It observes nothing."""
    SUGGEST = "suggest"
    """It reports the next step, and makes none."""
    AUTO = "auto"
    """It makes the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """Settings of the balancer. The first server by name balances the cluster with its own settings, so set them on all
    nodes alike."""

    mode: BalanceMode = BalanceMode.SUGGEST
    """Use of the steps against uneven load, disks and shares: `off`, `suggest` (reported only) or `auto` (made)."""
    moves_per_hour: Annotated[int, between(1, MOVES_MAX)] = 12
    """Maximum number of steps within an hour. Each step moves one lead, one replica or one range. Once they are made,
    the balancer waits."""
    window: str = ""
    """Time of day in UTC in which steps begin, for example `01:00-05:30`; it may span midnight. Empty: at any time. A
    step that has begun may end later."""
    settle_s: Annotated[float, between(1, 3_600)] = 60.0
    """Seconds for which an imbalance must last before a step is made, and that pass after each step. A partition takes
    part in one step within ten times this time, and no step is reversed within sixty times this time."""

    def __post_init__(self) -> None:
        faults = range_faults(self)
        if self.window and _minutes(self.window) is None:
            faults.append(f"window: expected two different times of day such as 01:00-05:30, got {self.window!r}")
        if faults:
            raise WrongSettings(*faults)

    def is_within_window(self, date_ms: int) -> bool:
        """Return True if steps may begin at this date, in milliseconds since 1970."""
        bounds = _minutes(self.window) if self.window else None
        if bounds is None:
            return True
        first, last = bounds
        return (date_ms // 60_000 - first) % DAY_MIN < (last - first) % DAY_MIN


def _minutes(window: str) -> tuple[int, int] | None:
    """Return the first and the last minute of a day's window, or None if the text is no window."""
    found = _WINDOW.fullmatch(window)
    if found is None:
        return None
    first_h, first_min, last_h, last_min = map(int, found.groups())
    first, last = first_h * 60 + first_min, last_h * 60 + last_min
    return (first, last) if first != last else None
