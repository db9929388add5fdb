"""A model of replicas that copy each other's states, one of which is damaged, under the rules of jury.py
(docs/protocol.md, P35). Promise: one damage never outvotes a healthy replica, whatever was copied before and
whichever replicas answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from kvstore.partition.election.jury import NO_ORIGINS, Origins, StateVerdict, is_copy_confirmed, judge
from kvstore.types import Seq, ServerId
from tests.models.search import Broken

SERVERS = tuple(ServerId(f"s{number}") for number in range(3))
Had = frozenset[tuple[Seq, int]]
T = TypeVar("T")


@dataclass(frozen=True)
class Rules:
    one_witness: bool = True
    """A copy and its donor have one vote."""
    by_others: bool = True
    """Other replicas confirm a copy. Without this rule, any check that the copy passes confirms it."""
    donor_named: bool = True
    """A copy of a copy names its direct donor too, not only the first donor: the direct donor may be confirmed a
    moment later."""


@dataclass(frozen=True)
class State:
    """The replicas in the order of SERVERS."""

    damaged: tuple[bool, ...] = (False, False, False)
    had: tuple[Had, ...] = (frozenset(), frozenset(), frozenset())
    origins: tuple[frozenset[ServerId], ...] = (frozenset(), frozenset(), frozenset())
    is_harmed: bool = False
    """The one damage has happened."""
    checks: int = 0
    copies: int = 0


@dataclass(frozen=True)
class Model:
    rules: Rules
    checks_max: int = 2
    copies_max: int = 2

    def steps(self, state: State) -> Iterator[tuple[str, State | Broken]]:
        for one in range(len(SERVERS)):
            yield from self._judged(state, one)
            if not state.is_harmed:
                yield f"s{one} is damaged", replace(state, damaged=_put(state.damaged, one, True), is_harmed=True)
            if state.origins[one] and self._is_borne_out(state, one):
                yield f"s{one} is borne out", replace(state, origins=_put(state.origins, one, frozenset()))
            if state.copies < self.copies_max:
                yield from ((f"s{one} copies s{other}", self._copy(state, one, other)) for other in _others(one))
        if state.checks < self.checks_max:
            for size in (2, 3):
                yield from ((f"check at {who}", _check(state, who)) for who in combinations(range(len(SERVERS)), size))

    def _copy(self, state: State, one: int, donor: int) -> State:
        through = state.origins[donor]
        if self.rules.donor_named or not through:
            through |= {SERVERS[donor]}
        return replace(
            state,
            damaged=_put(state.damaged, one, state.damaged[donor]),
            had=_put(state.had, one, frozenset()),
            origins=_put(state.origins, one, through),
            copies=state.copies + 1,
        )

    def _is_borne_out(self, state: State, one: int) -> bool:
        if not self.rules.by_others:
            return bool(state.had[one])
        return any(is_copy_confirmed(SERVERS[one], SERVERS, heard, _named(state)) for heard in _hearings(state, one))

    def _judged(self, state: State, one: int) -> Iterator[tuple[str, Broken]]:
        if state.damaged[one] or not state.is_harmed:
            return
        origins = _named(state) if self.rules.one_witness else NO_ORIGINS
        for heard in _hearings(state, one):
            if judge(SERVERS[one], Seq(1), SERVERS, heard, None, origins) is StateVerdict.OUTVOTED:
                yield f"s{one} hears {sorted(heard)}", Broken("a replica that is well is outvoted")


def _hearings(state: State, one: int) -> Iterator[dict[ServerId, dict[Seq, int]]]:
    for size in range(len(SERVERS)):
        for heard in combinations(_others(one), size):
            yield {SERVERS[each]: dict(state.had[each]) for each in (one, *heard)}


def _check(state: State, who: tuple[int, ...]) -> State:
    """Apply a check to the replicas `who`. All other replicas never apply it, which is the worst case."""
    at = Seq(state.checks + 1)
    had = tuple(
        each | {(at, 2 * at + state.damaged[one])} if one in who else each for one, each in enumerate(state.had)
    )
    return replace(state, had=had, checks=at)


def _named(state: State) -> Origins:
    return dict(zip(SERVERS, state.origins, strict=True))


def _others(one: int) -> list[int]:
    return [each for each in range(len(SERVERS)) if each != one]


def _put(row: tuple[T, ...], at: int, what: T) -> tuple[T, ...]:
    return (*row[:at], what, *row[at + 1 :])
