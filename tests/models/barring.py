"""A model of three replicas, one of them damaged, up to the log's check that shows the damage (docs/protocol.md, P35).

The check is in the part of the log that no ledger closes, so only a leader, or a candidate that recovers the log, reads
it. The replica that wrote the check has applied it. Replicas stop and start again, and learn that another replica
differs in any order. Each part of `Rules` is a rule that can be removed.

Promises:
- ten seconds after a replica learned of the difference, the damaged replica does not serve;
- with all replicas up and no more faults, an undamaged replica serves in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import permutations
from typing import NamedTuple

from tests.models.search import Broken

REPLICAS = range(3)
DAMAGED = 0
STOPS = 2
"""Maximum number of times that replicas stop. It bounds the search."""


class Verdict(Enum):
    """The outcome of one round of questions."""

    OPEN = "replicas that have not answered could still decide"
    RIGHT = "a majority has the same state"
    OUTVOTED = "a majority has another state"


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    unmet_are_free: bool = True
    """A replica that has not applied the check is not barred because another replica differs."""
    check_precedes_serving: bool = True
    """A replica reads the log to its end before it serves."""
    patience_ends: bool = True
    """A replica that agrees with the log is barred after ten seconds without a majority."""


class Replica(NamedTuple):
    """One replica. `is_late`: ten seconds have passed since it learned of the difference."""

    has_met: bool = False
    knows: bool = False
    is_late: bool = False
    is_barred: bool = False
    is_up: bool = True
    is_gone: bool = False
    """The replica was outvoted and its state is set aside."""


class State(NamedTuple):
    """The state of the model. `writer`: the replica that wrote the check."""

    replicas: tuple[Replica, ...]
    writer: int
    stops: int = STOPS


Step = tuple[str, "State | Broken"]


def firsts() -> Iterator[State]:
    """Yield the states in which the damaged replica or another one has just written the check."""
    for writer in (DAMAGED, 1):
        yield State(tuple(Replica(has_met=each == writer) for each in REPLICAS), writer)


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        if self._serves(state, DAMAGED) and state.replicas[DAMAGED].is_late and self._is_settled(state, DAMAGED):
            yield "the damaged replica answers a read", Broken("a damaged replica serves")
        if not self._recovers(state):
            yield "all replicas run undisturbed", Broken("no undamaged replica ever serves")
        for each in REPLICAS:
            replica = state.replicas[each]
            if replica.is_up and state.stops:
                stopped = _with(state, each, is_up=False)._replace(stops=state.stops - 1)
                yield f"{each} stops", stopped
                yield f"{each} stops, and its last writes are lost", _with(stopped, each, has_met=False)
            if not replica.is_up:
                yield f"{each} starts", _with(state, each, is_up=True)
            yield from self._progress(state, each)

    def _progress(self, state: State, each: int) -> Iterator[tuple[str, State]]:
        """Yield the steps of one replica that are not faults."""
        replica = state.replicas[each]
        if not replica.is_up or replica.is_gone:
            return
        if not replica.has_met and not replica.is_barred:
            differs = self._differs(state, each)
            yield (
                f"{each} reads the log to its end",
                _with(state, each, has_met=True, knows=replica.knows or differs, is_barred=differs),
            )
        if not replica.knows and any(self._differs(state, other) for other in self._met(state)):
            yield f"{each} learns of the difference", _with(state, each, knows=True)
        if replica.knows and not replica.is_late:
            yield f"ten seconds pass at {each}", _with(state, each, is_late=True)
        if replica.knows and (decided := self._decide(state, each)) != state:
            yield f"{each} decides", decided

    def _decide(self, state: State, each: int) -> State:
        replica = state.replicas[each]
        verdict = self._verdict(state, each)
        if verdict is Verdict.OUTVOTED:
            return _with(state, each, is_gone=True, is_barred=True)
        if verdict is Verdict.RIGHT:
            return _with(state, each, is_barred=False)
        if replica.has_met and self._differs(state, each):
            return _with(state, each, is_barred=True)
        is_concerned = replica.has_met or not self.rules.unmet_are_free
        is_barred = is_concerned and (replica.is_barred or (replica.is_late and self.rules.patience_ends))
        return _with(state, each, is_barred=is_barred)

    def _verdict(self, state: State, each: int) -> Verdict:
        met = self._met(state)
        agreeing = [other for other in met if (other == DAMAGED) == (each == DAMAGED)]
        if not state.replicas[each].has_met:
            return Verdict.OPEN
        if len(agreeing) > len(REPLICAS) // 2:
            return Verdict.RIGHT
        return Verdict.OUTVOTED if len(met) - len(agreeing) > len(REPLICAS) // 2 else Verdict.OPEN

    @staticmethod
    def _met(state: State) -> list[int]:
        """Return the replicas that are up and report their state at the check."""
        return [n for n, each in enumerate(state.replicas) if each.is_up and each.has_met and not each.is_gone]

    @staticmethod
    def _differs(state: State, each: int) -> bool:
        """Return True if the replica's state differs from the check in the log."""
        return (each == DAMAGED) != (state.writer == DAMAGED)

    def _serves(self, state: State, each: int) -> bool:
        replica = state.replicas[each]
        has_read = replica.has_met or not self.rules.check_precedes_serving
        return replica.is_up and not replica.is_gone and not replica.is_barred and has_read

    def _is_settled(self, state: State, each: int) -> bool:
        """Return True if the replica has nothing left to decide."""
        return self._decide(state, each) == state

    def _recovers(self, state: State) -> bool:
        """Return True if an undamaged replica serves once all replicas are up and run undisturbed, in every order of
        their turns."""
        return all(self._runs_to_a_leader(state, order) for order in permutations(REPLICAS))

    def _runs_to_a_leader(self, state: State, order: tuple[int, ...]) -> bool:
        for each in REPLICAS:
            state = _with(state, each, is_up=True)
        is_moving = True
        while is_moving:
            is_moving = False
            for each in order:
                for _, after in self._progress(state, each):
                    state, is_moving = after, True
                    break
        return any(self._serves(state, each) for each in REPLICAS if each != DAMAGED)


def _with(state: State, number: int, **changes: bool) -> State:
    replicas = list(state.replicas)
    replicas[number] = replicas[number]._replace(**changes)
    return state._replace(replicas=tuple(replicas))
