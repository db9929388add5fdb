"""Plans the balancer's next step. Decides only: a plan is a function of an observation, the settings, the record of
earlier steps, and the date.

One step is made at a time, and each plan sees the effect of the steps before. Each goal makes a step only if the step
lowers a sum of squares by a margin, and leaves no server or partition worse than the bounds from which the other goals
act. So the goals do not work against each other, and with constant load the steps come to an end.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.server.balance import leads, ranges, replicas
from kvstore.server.balance.judge import Judge, Verdict
from kvstore.server.balance.observation import Observation
from kvstore.server.balance.record import BalanceRecord
from kvstore.server.balance.step import Goal, Step
from kvstore.server.balance_config import BalanceConfig

_GOALS = {
    Goal.LEADS: leads.find,
    Goal.REPLICAS: replicas.find,
    Goal.LOAD: ranges.find_load,
    Goal.SHARES: ranges.find_shares,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step and its explanation."""

    step: Step | None
    """None if nothing is to be done."""
    waits: tuple[str, ...]
    """Reasons why the step is not made now."""
    notes: tuple[tuple[Goal, str], ...]
    """The finding of each goal, in the order in which the goals were asked."""
    budget_left: int
    causes: frozenset[tuple[Goal, str]] = frozenset()
    """The imbalances, of which each step relieves one."""

    @property
    def due(self) -> Step | None:
        """The step, unless it has to wait."""
        return None if self.waits else self.step


def plan(seen: Observation, config: BalanceConfig, record: BalanceRecord, now_ms: int) -> Plan:
    """Return at most one step, with the reason for it and the reasons to wait. The goal whose last step is oldest is
    asked first, so that no goal is kept from its steps by another."""
    judge = Judge(config, record, now_ms)
    notes: list[tuple[Goal, str]] = []
    causes: set[tuple[Goal, str]] = set()
    step: Step | None = None
    for goal in sorted(_GOALS, key=record.last_ms):
        verdict: Verdict = _GOALS[goal](seen, judge)
        notes.append((goal, verdict.text))
        causes |= {(goal, source) for source in verdict.sources}
        causes |= {verdict.step.cause} if verdict.step is not None else set()
        step = step or verdict.step
    return Plan(
        step=step,
        waits=tuple(_waits(seen, config, record, now_ms)),
        notes=tuple(notes),
        budget_left=record.budget_left(config, now_ms),
        causes=frozenset(causes),
    )


def _waits(seen: Observation, config: BalanceConfig, record: BalanceRecord, now_ms: int) -> list[str]:
    waits = list(seen.obstacles)
    if not config.is_within_window(now_ms):
        waits.append(f"steps begin only from {config.window} UTC")
    if not record.budget_left(config, now_ms):
        waits.append(f"{config.moves_per_hour} steps were made within an hour, which is the budget")
    if (rests_s := record.rests_s(config, now_ms)) > 0:
        waits.append(f"the last step takes effect; the next one is possible in {rests_s:.0f} s")
    return waits


class Patience:
    """The time for which one server has seen each imbalance without a break."""

    def __init__(self) -> None:
        self._since: dict[tuple[Goal, str], float] = {}

    def lasts_s(self, planned: Plan, now: float) -> float:
        """Record the present imbalances, and return the seconds for which that of the step has lasted; 0 if no step is
        due. A plan that waits ends all of them."""
        self._since = {} if planned.waits else {each: self._since.get(each, now) for each in planned.causes}
        return now - self._since[planned.due.cause] if planned.due is not None else 0.0

    def forget(self) -> None:
        """Begin again with all imbalances."""
        self._since.clear()
