"""A model of three replicas that may depose their leader (docs/protocol.md, P40). Each part of it is a rule that can be
removed.

Reachability has a direction: i reaches j if j's address answers i's questions. The network changes once, to any
relation, and then to full reachability. Time passes in ticks, and everything that is due is done within a tick. One
process may pause for some ticks. `unheard` counts ticks: 1 confirms, 2 asks.

Promises:
- a leader that all replicas but one reach, or reached until a moment ago, is never deposed: one observer alone deposes
  no leader, and a late transaction does not strike the successor;
- once the network is stable, leadership changes at most twice: once by an earlier agreement;
- two replicas that reach each other and do not reach the leader get a leader that they reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from tests.models.search import Broken

REPLICAS = (0, 1, 2)
MAJORITY = 2
PAIRS = tuple(permutations(REPLICAS, 2))
CONFIRMS, ASKS = 1, 2
DEPOSITIONS_MAX = 2
STUCK_MAX = 4
NOBODY = -1

Reach = frozenset[tuple[int, int]]
FULL: Reach = frozenset(PAIRS)


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    majority_agrees: bool = True
    """A majority has received no answer from the leader. Without: the replica that asks is enough."""
    majority_reaches_the_asker: bool = True
    """A replica deposes only if a majority reaches it."""
    awake_time_counts: bool = True
    """A process that was paused measures from the end of the pause on."""
    term_is_checked: bool = True
    """The transaction fails if another replica has claimed leadership since the question."""
    replaced_in_one_step: bool = True
    """Without: the znode is removed, and the first replica to claim it leads, possibly the former leader."""
    asks_at_all: bool = True
    """Without: a leader keeps leadership as long as its session lives."""


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    reach: Reach = FULL
    holder: int = 0
    """The owner of the leader's znode."""
    former: int = NOBODY
    """The leader whose znode was removed, and which still serves."""
    term: int = 0
    unheard: tuple[int, ...] = (0, 0, 0)
    """By replica: ticks without an answer from the holder, as the replica measures them."""
    missed: tuple[int, ...] = (0, 0, 0)
    """Ticks of this term in which the replica did not in fact reach the holder."""
    agreed: tuple[tuple[int, int], ...] = ()
    """Transactions in flight: the sender, and the term at which it asked."""
    asleep: int = NOBODY
    naps: int = 1
    changes: int = 2
    depositions: int = 0
    """Number of depositions since the last change of the network."""
    stuck: int = 0
    """Number of ticks in which two replicas that reach each other have not reached the holder."""


Step = tuple[str, "State | Broken"]


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        yield from self._network(state)
        due = list(self._due(state))
        yield from due
        yield from self._sleep(state)
        if not due:
            yield "a tick passes", self._tick(state)

    def _network(self, state: State) -> Iterator[Step]:
        if state.changes == 2:
            for number in range(1 << len(PAIRS)):
                reach = frozenset(pair for place, pair in enumerate(PAIRS) if number >> place & 1)
                yield f"now reach {sorted(reach)}", self._changed(state, reach)
        elif state.changes == 1:
            yield "the network heals", self._changed(state, FULL)

    def _changed(self, state: State, reach: Reach) -> State:
        return state._replace(reach=reach, changes=state.changes - 1, depositions=0, stuck=0)

    def _sleep(self, state: State) -> Iterator[Step]:
        if state.asleep == NOBODY and state.naps:
            for each in REPLICAS:
                yield f"{each} stands still", state._replace(asleep=each, naps=state.naps - 1)
        elif state.asleep != NOBODY:
            each, unheard = state.asleep, list(state.unheard)
            unheard[each] = 0 if self.rules.awake_time_counts or each == state.holder else ASKS
            yield f"{each} goes on", state._replace(asleep=NOBODY, unheard=tuple(unheard))

    # ── what is due ──

    def _due(self, state: State) -> Iterator[Step]:
        if state.holder == NOBODY:
            for each in REPLICAS:
                is_candidate = each == state.former or each in [asker for asker, _ in state.agreed]
                if is_candidate and each != state.asleep:
                    yield f"{each} claims", self._led_by(state, each)
            return
        for place, (asker, term) in enumerate(state.agreed):
            if asker != state.asleep:
                agreed = state.agreed[:place] + state.agreed[place + 1 :]
                yield f"{asker} sends its transaction", self._depose(state._replace(agreed=agreed), asker, term)
        for asker in REPLICAS:
            if self._may_depose(state, asker):
                agreed = (*state.agreed, (asker, state.term))
                yield f"{asker} has asked", state._replace(agreed=tuple(sorted(agreed)))

    def _may_depose(self, state: State, asker: int) -> bool:
        is_due = state.unheard[asker] >= ASKS and asker not in (state.holder, state.asleep)
        if not self.rules.asks_at_all or not is_due or asker in [each for each, _ in state.agreed]:
            return False
        others = [each for each in REPLICAS if each not in (asker, state.holder, state.asleep)]
        answering = [each for each in others if (asker, each) in state.reach]
        agreeing = 1 + sum(state.unheard[each] >= CONFIRMS for each in answering)
        reaching = 1 + sum((each, asker) in state.reach for each in answering)
        is_agreed = agreeing >= MAJORITY or not self.rules.majority_agrees
        return is_agreed and (reaching >= MAJORITY or not self.rules.majority_reaches_the_asker)

    def _depose(self, state: State, asker: int, term: int) -> State | Broken:
        if self.rules.term_is_checked and term != state.term:
            return state
        if asker == state.holder:
            return state
        if sum(ticks > 0 for ticks in state.missed) < MAJORITY:
            return Broken(f"{state.holder} is deposed, and only {state.missed} did not reach it")
        state = state._replace(depositions=state.depositions + 1)
        if state.depositions > DEPOSITIONS_MAX:
            return Broken("the lead goes round")
        if self.rules.replaced_in_one_step:
            return self._led_by(state, asker)
        agreed = tuple(sorted((*state.agreed, (asker, term))))
        return state._replace(holder=NOBODY, former=state.holder, agreed=agreed)

    def _led_by(self, state: State, leader: int) -> State:
        agreed = tuple(each for each in state.agreed if each[0] != leader)
        begun = state._replace(holder=leader, former=NOBODY, agreed=agreed, term=state.term + 1, stuck=0)
        return begun._replace(unheard=(0, 0, 0), missed=(0, 0, 0))

    # ── time ──

    def _tick(self, state: State) -> State | Broken:
        unheard, missed = list(state.unheard), list(state.missed)
        for each in REPLICAS:
            if each == state.holder:
                continue
            is_answered = (each, state.holder) in state.reach and state.holder != state.asleep
            if not is_answered:
                missed[each] = 1
            if each != state.asleep:
                unheard[each] = 0 if is_answered else min(ASKS, unheard[each] + 1)
        stuck = state.stuck + 1 if self._should_change(state) else 0
        if stuck > STUCK_MAX:
            return Broken(f"{state.holder} leads on, and the other two do not reach it")
        return state._replace(unheard=tuple(unheard), missed=tuple(missed), stuck=stuck)

    def _should_change(self, state: State) -> bool:
        """Return True if two awake replicas reach each other and neither reaches the holder."""
        one, other = (each for each in REPLICAS if each != state.holder)
        awake = state.asleep not in (one, other)
        is_pair = {(one, other), (other, one)} <= state.reach
        is_lost = state.asleep == state.holder or not {(one, state.holder), (other, state.holder)} & state.reach
        return awake and is_pair and is_lost
