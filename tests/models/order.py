"""A model of writes on one key that came to one server in order and go over one link to another, which at times leads
what they go to and owns their key, and at times does not: rule M15 of docs/protocol.md, each part of it a rule that can
be taken away.

What is submitted in one turn leaves as a frame later; frames and results come in the order in which they were sent.
What is refused goes out again.

Promised: the writes are done in the order in which they came, and once the key stays, what goes out again is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.models.search import Broken

NOT_SAID = 1 << 30


@dataclass(frozen=True)
class Rules:
    """What is done right; False takes the rule away."""

    refuses_until_heard: bool = True
    """Until the sender has heard of a refusal, what follows is refused too."""
    speaks_of_submission: bool = True
    """What was submitted before a refusal was heard says so, also if it leaves later."""
    later_wait: bool = True
    """What comes while a refused one waits to go out again waits behind it."""
    waits_for_all: bool = True
    """Nothing goes out again before everything has come back."""
    keeps_order: bool = True
    """What goes out again goes in the order in which it came."""


class Frame(NamedTuple):
    """Of operations: writes by their number, and how many frames of results their sender had heard."""

    writes: tuple[int, ...]
    heard: int


class State(NamedTuple):
    """All of it. The last ones bound the search."""

    next: int = 1
    lane: tuple[int, ...] = ()
    """Submitted, and not sent."""
    strays: tuple[int, ...] = ()
    under_way: frozenset[int] = frozenset()
    """In the lane or sent, and not answered."""
    heard: int = 0
    there: tuple[Frame, ...] = ()
    """On its way to the answering server."""
    back: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Frames of results on their way back: what is done, what is refused."""
    owns: bool = False
    refused_by: int = 0
    """The frame that tells of the last refusal."""
    said: int = 0
    """Frames of results sent."""
    done_now: tuple[int, ...] = ()
    refused_now: tuple[int, ...] = ()
    """With the next frame of results."""
    done: int = 0
    """The last write that was done."""
    changes: int = 3
    again: int = 4
    """How often refused ones may go out again."""
    stays: bool = False
    """Some have gone out again since the key stays."""


Step = tuple[str, "State | Broken"]


class Model:
    """The steps under some rules."""

    def __init__(self, rules: Rules, writes: int) -> None:
        self.rules, self.writes = rules, writes

    def steps(self, state: State) -> Iterator[Step]:
        """Everything that may happen next."""
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
