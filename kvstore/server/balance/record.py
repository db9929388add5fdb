"""The record of the steps that the balancer has made: its budget, its rests, and what it must not reverse. Decides
only. The record is one table in the metadata store, so it survives the server that balances.

A step is recorded before it is made, in the same compare-and-set that checks the budget and the rest. So two servers
that both balance make no more steps than one (docs/protocol.md H13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvstore.errors import InvalidRequest
from kvstore.meta import paths
from kvstore.meta.store import MetadataStore
from kvstore.meta.tables.table import TableKind, TableStore
from kvstore.server.balance.step import Goal, Step, Way, way_back
from kvstore.server.balance_config import MOVES_MAX, BalanceConfig

HOUR_MS = 3_600_000
COOLDOWN_SETTLES, BACK_SETTLES = 10, 60
"""A partition takes part in one step within this multiple of the settling time, and no step is reversed within that
multiple."""
KEPT_MAX = MOVES_MAX + 16
"""Maximum number of steps in the record. The budget of an hour fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A step that was made, or was about to be made when its server ended."""

    step: Step
    at_ms: int
    """Date in milliseconds since 1970."""
    by: str
    """The server that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRecord:
    """The steps that were made, oldest first."""

    steps: tuple[Made, ...] = ()

    def within(self, now_ms: int, period_ms: float) -> Iterator[Made]:
        """Yield the steps of the last `period_ms` milliseconds. Steps from the next hour count too, because the clock
        of the server that made them may be ahead. A step from further in the future does not count: its date was wrong,
        and would stop the balancer for good."""
        return (made for made in self.steps if -HOUR_MS < now_ms - made.at_ms < period_ms)

    def budget_left(self, config: BalanceConfig, now_ms: int) -> int:
        """Return how many steps may still be made now."""
        return max(0, config.moves_per_hour - sum(1 for _ in self.within(now_ms, HOUR_MS)))

    def rests_s(self, config: BalanceConfig, now_ms: int) -> float:
        """Return the seconds until the cluster counts as settled after the last step; 0 if it does now."""
        period_ms = config.settle_s * 1000
        return max((period_ms + made.at_ms - now_ms for made in self.within(now_ms, period_ms)), default=0) / 1000

    def last_ms(self, goal: Goal) -> int:
        """Return the date of the last step for a goal; 0 if there was none."""
        return max((made.at_ms for made in self.steps if made.step.goal is goal), default=0)

    def rested(self, config: BalanceConfig, now_ms: int) -> frozenset[str]:
        """Return the partitions that took part in a step not long ago, and therefore rest."""
        found: set[str] = set()
        for made in self.within(now_ms, COOLDOWN_SETTLES * config.settle_s * 1000):
            found |= {made.step.partition, *((made.step.target,) if made.step.goal.moves_ranges else ())}
        return frozenset(found)

    def ways_back(self, config: BalanceConfig, now_ms: int) -> frozenset[Way]:
        """Return the ways of the steps that would reverse one that was made not long ago."""
        return frozenset(way_back(made.step) for made in self.within(now_ms, BACK_SETTLES * config.settle_s * 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A step that is about to be made, with the settings that it must keep."""

    made: Made
    config: BalanceConfig


# docs/protocol.md H13
def applied(record: BalanceRecord, intent: Intent) -> BalanceRecord:
    """Return the record with the step. Raises InvalidRequest if another step has used the budget, or was made too
    short a time ago."""
    made, config = intent.made, intent.config
    if made in record.steps:  # an attempt whose outcome was unknown has written it
        return record
    if not record.budget_left(config, made.at_ms):
        raise InvalidRequest(f"expected at most {config.moves_per_hour} steps within an hour, got one more")
    if (rests_s := record.rests_s(config, made.at_ms)) > 0:
        raise InvalidRequest(
            f"expected {config.settle_s:g} s between two steps; the last one needs {rests_s:.0f} s more"
        )
    return BalanceRecord(steps=(*record.steps, made)[-KEPT_MAX:])


class _Parts(msgspec.Struct):
    """The part that a record must have. A record without it must not be taken for an empty one, which has its whole
    budget."""

    steps: list[msgspec.Raw]


KIND: TableKind[BalanceRecord, Intent] = TableKind(
    path=paths.BALANCE,
    what="the record of the balancer",
    empty=BalanceRecord(),
    whole=_Parts,
    applied=applied,
    removals=(),
)


def record_store(store: MetadataStore) -> TableStore[BalanceRecord, Intent]:
    """Return the record in the metadata store."""
    return TableStore(store, KIND)
