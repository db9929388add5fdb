"""A model of two replicas, one of which leads, while the other replicas of the partition are away (docs/protocol.md,
P40). No replica can then contradict a refused connection. Each part is a rule that can be removed.

The network changes to any set of refusals, back to none, and again to any set. One process may die; its address then
refuses connections too, and its session ends some time later.

Promises:
- while the network is stable, a refusal changes the leader at most once;
- a leader that has died is replaced before its session ends, unless it has deposed the other replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.search import Broken

REFUSALS = (frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1}))
"""The replicas whose connections are refused."""
NOBODY = -1


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    refusal_deposes: bool = True
    """A refused connection alone deposes the leader."""
    deposed_waits: bool = True
    """A replica waits for the end of the session of the leader that has deposed it."""


class State(NamedTuple):
    """The whole state. The last two fields bound the search."""

    leader: int = 0
    has_deposed: bool = False
    """The leader has deposed the other replica."""
    refused: frozenset[int] = frozenset()
    dead: int = NOBODY
    changes: int = 3
    depositions: int = 0
    """Number of depositions since the last change of the network."""


Step = tuple[str, "State | Broken"]


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        if state.changes:
            for refused in REFUSALS if state.changes % 2 else REFUSALS[:1]:
                changed = state._replace(refused=refused, changes=state.changes - 1, depositions=0)
                yield f"refused are {sorted(refused)}", changed
        if state.dead == NOBODY:
            for each in (0, 1):
                yield f"{each} dies", state._replace(dead=each)
        other = 1 - state.leader
        if state.dead == other:
            return
        is_refused = other in state.refused or state.dead == state.leader
        may_depose = self.rules.refusal_deposes and not (self.rules.deposed_waits and state.has_deposed)
        if is_refused and may_depose:
            yield f"{other} deposes {state.leader}", self._depose(state, other)
        elif state.dead == state.leader:
            yield "the session ends", self._session_ends(state, other)

    def _depose(self, state: State, successor: int) -> State | Broken:
        depositions = state.depositions + (state.dead == NOBODY)
        if depositions > 1:
            return Broken("the lead goes round")
        return state._replace(leader=successor, has_deposed=True, depositions=depositions)

    def _session_ends(self, state: State, successor: int) -> State | Broken:
        if not state.has_deposed:
            return Broken(f"{state.leader} is dead, and leads until its session ends")
        return state._replace(leader=successor, has_deposed=False)
