"""A step of the balancer: one lead, one replica or one range that moves, and the reason. Values; decides only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Goal(StrEnum):
    """The purpose of a step: the state that it improves."""

    LEADS = "leads"
    """The leaders' work is even between servers."""
    REPLICAS = "replicas"
    """The replicas and the used disk space are even between servers."""
    LOAD = "load"
    """No partition has so much load that its leader's server is overloaded."""
    SHARES = "shares"
    """No partition owns a much larger share of the ring than others."""

    @property
    def moves_ranges(self) -> bool:
        """True if the steps move ranges between partitions. Other steps move leads or replicas between servers."""
        return self in (Goal.LOAD, Goal.SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step."""

    goal: Goal
    partition: str
    source: str
    """The server, or for a range the partition, that the lead, replica or range leaves."""
    target: str
    first: int = 0
    """The first token of a range."""
    last: int = 0
    """The last token of a range."""
    reason: str

    @property
    def command(self) -> str:
        """The command that makes this step."""
        match self.goal:
            case Goal.LEADS:
                return f"kvstore partition move-lead {self.partition} {self.target}"
            case Goal.REPLICAS:
                return f"kvstore partition move-replica {self.partition} {self.source} {self.target}"
            case Goal.LOAD | Goal.SHARES:
                return f"kvstore ring move {self.target} --first {self.first} --last {self.last}"

    @property
    def cause(self) -> tuple[Goal, str]:
        """The imbalance that must last until a step is made: the goal and the overloaded side. The best step against
        one overload may be another one at each observation."""
        return self.goal, self.source

    def __str__(self) -> str:
        what = {Goal.LEADS: "the lead of", Goal.REPLICAS: "a replica of"}.get(self.goal, "a range of")
        return f"move {what} {self.partition} from {self.source} to {self.target}: {self.reason}"


Way = tuple[str, str, str, str]
"""Kind of step, partition, source and target. Ranges that move between two partitions are all alike, because one
may contain the other."""


def way_of(step: Step) -> Way:
    """Return the way of the step."""
    if step.goal.moves_ranges:
        return "range", "", step.source, step.target
    return step.goal.value, step.partition, step.source, step.target


def way_back(step: Step) -> Way:
    """Return the way of the steps that move back what the step has moved."""
    what, whose, source, target = way_of(step)
    return what, whose, target, source
