"""Bounds that all goals of the balancer share: which partitions rest, and which steps would reverse an earlier one.
Decides only."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvstore.server.balance.record import BalanceRecord
from kvstore.server.balance.step import Step, way_of
from kvstore.server.balance_config import BalanceConfig

HIGH = 1.25
"""A server is overloaded from this multiple of the mean work ..."""
WORK_MIN = 200.0
"""... and from this much work per second above the mean. Smaller differences cost nothing and are mostly chance."""
GAIN = 0.1
"""A step must lower the work of the busier of its two servers by at least this part of the mean. Without a minimum,
steps of nearly equal outcome would follow each other forever."""


class Verdict(NamedTuple):
    """The finding of a goal: the best step, or why there is none."""

    step: Step | None
    text: str
    sources: Collection[str] = ()
    """All overloaded sides, of which the step relieves one. Loads fluctuate, so the most overloaded side may be another
    one at each observation."""


class Judge:
    """Judges possible steps by the record of earlier ones."""

    def __init__(self, config: BalanceConfig, record: BalanceRecord, now_ms: int) -> None:
        self._resting, self._ways_back = record.rested(config, now_ms), record.ways_back(config, now_ms)

    def rests(self, *partitions: str) -> bool:
        """Return True if one of the partitions took part in a step not long ago."""
        return not self._resting.isdisjoint(partitions)

    def allows(self, step: Step) -> bool:
        """Return True if none of the step's partitions rests and the step reverses no recent one."""
        touched = (step.partition, step.target) if step.goal.moves_ranges else (step.partition,)
        return not self.rests(*touched) and way_of(step) not in self._ways_back


def threshold(mean: float) -> float:
    """Return the work per second from which a server is overloaded."""
    return max(HIGH * mean, mean + WORK_MIN)
