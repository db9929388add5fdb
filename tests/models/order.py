"""A model of writes on one key that arrive at one server in order and go over one link to another server. At times the
other server leads the key's partition and owns the key, and at times it does not. Rule M15 of docs/protocol.md; each
part of it can be removed.

Writes submitted in one turn leave later as one frame. Frames and results arrive in the order in which they were sent.
Refused writes are sent again.

Promises: the writes are done in the order in which they arrived, and once the key stays in place, every write that is
sent again is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.search import Broken

NOT_SAID = 1 << 30


@dataclass(frozen=True)
class Rules:
    """The rules of the model. A rule that is False is not kept."""

    refuses_until_heard: bool = True
    """Until the sender has received a refusal, all following writes are refused too."""
    speaks_of_submission: bool = True
    """A write that was submitted before the sender received a refusal carries that fact, even if it leaves later."""
    later_wait: bool = True
    """A write that arrives while a refused write waits to be sent again waits behind it."""
    waits_for_all: bool = True
    """Nothing is sent again before all writes in flight have returned."""
    keeps_order: bool = True
    """Refused writes are sent again in the order in which they arrived."""


class Frame(NamedTuple):
    """A frame of operations: the numbers of the writes, and the number of result frames that the sender had
    received."""

    writes: tuple[int, ...]
    heard: int


class State(NamedTuple):
    """The whole state. The last fields bound the search."""

    next: int = 1
    lane: tuple[int, ...] = ()
    """Submitted, and not sent."""
    strays: tuple[int, ...] = ()
    under_way: frozenset[int] = frozenset()
    """In the lane or sent, and not answered."""
    heard: int = 0
    there: tuple[Frame, ...] = ()
    """Frames on their way to the answering server."""
    back: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Result frames on their way back: done writes, refused writes."""
    owns: bool = False
    refused_by: int = 0
    """The frame that carries the last refusal."""
    said: int = 0
    """Number of result frames sent."""
    done_now: tuple[int, ...] = ()
    refused_now: tuple[int, ...] = ()
    """Writes that the next result frame refuses."""
    done: int = 0
    """The last write that was done."""
    changes: int = 3
    again: int = 4
    """Number of times that refused writes may still be sent again."""
    stays: bool = False
    """True if writes have been sent again since the key stays in place."""


Step = tuple[str, "State | Broken"]


class Model:
    """The steps that a set of rules allows."""

    def __init__(self, rules: Rules, writes: int) -> None:
        self.rules, self.writes = rules, writes

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps."""
        if state.next <= self.writes:
            yield f"write {state.next} comes", self._submitted(state)
        if state.lane:
            yield "a frame leaves", self._sent(state)
        if state.there:
            yield "a frame arrives", self._arrived(state)
        if state.done_now or state.refused_now:
            yield "results leave", self._told(state)
        if state.back:
            yield "results arrive", self._heard(state)
        if state.strays and state.again and not (self.rules.waits_for_all and state.under_way):
            yield "refused ones go out again", self._again(state)
        if state.changes:
            yield "the key comes or goes", state._replace(owns=not state.owns, changes=state.changes - 1)

    # ── the asking server ──

    def _submitted(self, state: State) -> State:
        number = state.next
        state = state._replace(next=number + 1)
        if state.strays and self.rules.later_wait:
            return state._replace(strays=(*state.strays, number))
        return state._replace(lane=(*state.lane, number), under_way=state.under_way | {number})

    def _sent(self, state: State) -> State:
        return state._replace(lane=(), there=(*state.there, Frame(state.lane, state.heard)))

    def _heard(self, state: State) -> State:
        (done, refused), *more = state.back
        if state.lane and refused and self.rules.speaks_of_submission:
            state = self._sent(state)
        strays = (*state.strays, *refused)
        return state._replace(
            back=tuple(more),
            heard=state.heard + 1,
            under_way=state.under_way - set(done) - set(refused),
            strays=tuple(sorted(strays)) if self.rules.keeps_order else strays,
        )

    def _again(self, state: State) -> State:
        under_way = state.under_way | set(state.strays)
        stays = state.stays or (state.owns and not state.changes)
        lane = state.lane + state.strays
        return state._replace(lane=lane, strays=(), under_way=under_way, again=state.again - 1, stays=stays)

    # ── the answering server ──

    def _arrived(self, state: State) -> State | Broken:
        (writes, heard), *more = state.there
        state = state._replace(there=tuple(more))
        for number in writes:
            is_blocked = self.rules.refuses_until_heard and state.refused_by > heard
            if is_blocked and state.stays:
                return Broken(f"write {number} is refused again, though the key stays")
            if is_blocked or not state.owns:
                state = state._replace(refused_now=(*state.refused_now, number), refused_by=NOT_SAID)
            elif number < state.done:
                return Broken(f"write {number} is done after {state.done}")
            else:
                state = state._replace(done_now=(*state.done_now, number), done=number)
        return state

    def _told(self, state: State) -> State:
        said = state.said + 1
        return state._replace(
            back=(*state.back, (state.done_now, state.refused_now)),
            done_now=(),
            refused_now=(),
            said=said,
            refused_by=said if state.refused_now else state.refused_by,
        )
