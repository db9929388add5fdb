"""A model of transactions and batches that wait for keys, without the rules of time: the sites at which they lock keys,
the lines in which they wait, and the deadlocks (docs/protocol.md, Tx16). Each part of `Rules` can be removed.

A site is a partition. B has two keys, and so has A where there are reads; the other sites have one. A transaction
begins at home, locks its keys at each participant, and decides at home. A waiting transaction or batch has a place in
the line of the site, and blocks those behind it that want one of its keys. A batch holds nothing, but may wait in a
line. Everything may happen in any order.

A read of a range of keys waits for intents whose PREPARED was sent, and withholds PREPARED of later attempts (Tx9). An
attempt is later if its number is higher: the numbers are in all orders.

Promise: as long as something has not ended, something can happen. Nothing here ends by a deadline, except that a read
stops withholding PREPARED while something waits in a line.

Left out: what the keys contain, shared intents (a transaction that only reads locks like the others), takeovers, and
messages that are lost (tests/models/txn.py has them; a wait there is a message that comes late).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, product
from typing import NamedTuple

from tests.models.search import Broken

KEYS = ("a", "b", "B", "c")
SITE = {"a": 0, "A": 0, "b": 1, "B": 1, "c": 2}


class Rules(NamedTuple):
    """The rules of the model. A rule that is False is not kept."""

    only_greatest: bool = True
    """Only PREPARE at the greatest participant waits; others are refused."""
    claim_before: bool = True
    """Home claims its keys at the beginning only if a participant is greater than home."""
    decide_last: bool = True
    """DECIDE waits only if home is greater than all participants."""
    one_order: bool = True
    """All transactions have the same order of sites."""
    no_place: bool = True
    """An attempt that claims nothing waits for the one before it at the same home key without a place in the line."""
    in_turn: bool = True
    """A transaction that only reads locks one participant after the other, because its PREPARE waits at each."""


class ReadRules(NamedTuple):
    """The rules of reads. A rule that is False is not kept."""

    limited: bool = True
    """Tx9: a read withholds PREPARED for a limited time."""
    one_order: bool = True
    """Tx9: all participants have the same order of attempts."""


READ_RULES = ReadRules()


class Work(NamedTuple):
    """A transaction, or a batch: `parts` is empty. A transaction writes the first of its home keys and reads the
    other one."""

    home: tuple[str, ...]
    parts: tuple[str, ...] = ()
    is_read: bool = False
    """True for a read of `home`."""
    only_reads: bool = False
    """True for a transaction that only reads. It claims nothing."""


class State(NamedTuple):
    """The whole state. Work is named by its number."""

    begun: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    claims: frozenset[tuple[int, str]] = frozenset()
    intents: frozenset[tuple[int, str]] = frozenset()
    lines: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...] = ((), (), ())
    """Per site the places: work and the keys that it wants."""
    unsaid: frozenset[tuple[int, str]] = frozenset()
    """The intents whose PREPARED is withheld."""
    patient: frozenset[int] = frozenset()
    """The reads that wait and withhold PREPARED."""


Step = tuple[str, "State | Broken"]


def scopes() -> Iterator[tuple[Work, ...]]:
    """Yield all sets of three transactions, and all pairs of transactions with a batch or with a transaction that only
    reads."""
    some = [keys for keys in combinations(KEYS, 2) if SITE[keys[0]] != SITE[keys[1]]] + [("a", "b", "c")]
    txns = [Work((home,), tuple(key for key in keys if key != home)) for keys in some for home in keys]
    txns.append(Work(("b", "B"), ("c",)))
    yield from combinations_with_replacement(txns, 3)
    for pair in combinations_with_replacement(txns, 2):
        yield (*pair, Work(("b", "B")))
    readers = [Work((home,), tuple(key for key in "cba" if key != home), only_reads=True) for home in "abc"]
    for pair in product(readers, txns + readers):
        yield from ((*pair, other) for other in txns[-4:])


def scopes_with_reads() -> Iterator[tuple[Work, ...]]:
    """Yield pairs of transactions of three sites in both orders, with reads of all keys of A and B."""
    some = (("a", "b", "c"), ("a", "B", "c"), ("A", "B", "c"))
    txns = [Work((home,), tuple(key for key in keys if key != home)) for keys in some for home in keys]
    for pair in product(txns, repeat=2):
        yield (*pair, Work(("a", "A"), is_read=True), Work(("b", "B"), is_read=True))


class Model:
    """The steps of some work that a set of rules allows."""

    def __init__(
        self,
        work: tuple[Work, ...],
        rules: Rules,
        alone: frozenset[int] = frozenset(),
        reads: ReadRules = READ_RULES,
    ) -> None:
        """`alone` are the transactions that name versions. They wait for each other at their home key, and for all
        attempts that have claimed it."""
        self.work, self.rules, self.alone, self.reads = work, rules, alone, reads

    def steps(self, state: State) -> Iterator[Step]:
        """Yield all possible next steps. Where there are none, everything must have ended."""
        found = [
            (label, after)
            for number in range(len(self.work))
            if number not in state.ended
            for label, after in self._steps(state, number)
            if after != state
        ]
        yield from found
        if not found and len(state.ended) < len(self.work):
            yield "nothing can happen any more", Broken("work waits forever")

    def _steps(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        work = self.work[number]
        if work.is_read:
            yield from self._read(state, number)
        elif not work.parts:
            free = self._is_free(state, number, work.home)
            yield f"batch {number}", self._end(state, number) if free else self._wait(state, number, work.home)
        elif number not in state.begun:
            yield f"{number} begins", self._begin(state, number)
        else:
            left = [key for key in work.parts if (number, key) not in state.intents]
            if work.only_reads and self.rules.in_turn:
                left = sorted(left, key=self._rank(number))[:1]
            for key in left:
                yield f"{number} prepares {key}", self._prepare(state, number, key)
            unsaid = [key for key in work.parts if (number, key) in state.unsaid]
            for key in unsaid:
                if not self._is_withheld(state, number, key):
                    after = state._replace(unsaid=state.unsaid - {(number, key)})
                    yield f"PREPARED of {number} for {key} is sent", after
            if not left and not unsaid:
                yield f"{number} decides", self._decide(state, number)

    def _begin(self, state: State, number: int) -> State:
        home = self.work[number].home
        if self._is_home_last(number) and self.rules.claim_before:
            running = (state.begun - state.ended - {number}) & self.alone if number in self.alone else frozenset[int]()
            if any(self._is_home_last(each) and self.work[each].home == home for each in running):
                return state if self.rules.no_place else self._wait(state, number, home)
        elif not self._is_free(state, number, home, shares=number not in self.alone):
            return self._wait(state, number, home)
        elif not self.work[number].only_reads:
            state = state._replace(claims=state.claims | {(number, home[0])})
        return self._leave(state, number)._replace(begun=state.begun | {number})

    def _prepare(self, state: State, number: int, key: str) -> State:
        if self._is_free(state, number, (key,)):
            unsaid = frozenset({(number, key)} if self._is_withheld(state, number, key) else ())
            after = self._leave(state, number)
            return after._replace(intents=state.intents | {(number, key)}, unsaid=state.unsaid | unsaid)
        greatest = max(map(self._rank(number), self.work[number].parts))
        may_wait = self.work[number].only_reads or not self.rules.only_greatest
        if may_wait or self._rank(number)(key) == greatest:
            return self._wait(state, number, (key,))
        return self._end(state, number)

    def _decide(self, state: State, number: int) -> State:
        home = tuple(key for key in self.work[number].home if (number, key) not in state.claims)
        if not home or self._is_free(state, number, home):
            return self._end(state, number)
        if self._is_home_last(number) or not self.rules.decide_last:
            return self._wait(state, number, home)
        return self._end(state, number)

    # ── reads ──

    def _read(self, state: State, number: int) -> Iterator[tuple[str, State]]:
        if not self._awaited(state, number):
            yield f"read {number} is answered", self._end(state, number)
        elif number not in state.begun:
            after = state._replace(begun=state.begun | {number}, patient=state.patient | {number})
            yield f"read {number} waits", after
        elif self.reads.limited and any(state.lines):
            yield f"read {number} withholds nothing more", state._replace(patient=state.patient - {number})

    def _awaited(self, state: State, number: int) -> list[int]:
        """Return the transactions for which a read waits."""
        return [other for other, key in state.intents - state.unsaid if key in self.work[number].home]

    def _is_withheld(self, state: State, number: int, key: str) -> bool:
        sign = -1 if SITE[key] % 2 and not self.reads.one_order else 1
        return any(
            key in self.work[read].home and all(sign * number > sign * other for other in self._awaited(state, read))
            for read in state.patient
        )

    # ── keys and lines ──

    def _rank(self, number: int) -> Rank:
        return Rank(-1 if number % 2 and not self.rules.one_order else 1)

    def _is_home_last(self, number: int) -> bool:
        work, rank = self.work[number], self._rank(number)
        return all(rank(work.home[0]) > rank(key) for key in work.parts)

    def _is_free(self, state: State, number: int, keys: tuple[str, ...], *, shares: bool = False) -> bool:
        """Return True if nobody holds one of the keys, and nobody who came earlier waits for one. With `shares`, claims
        do not count."""
        held = state.intents if shares else state.claims | state.intents
        if any(key in keys and other != number for other, key in held):
            return False
        for other, wanted in state.lines[SITE[keys[0]]]:
            if other == number:
                return True
            if not set(wanted).isdisjoint(keys):
                return False
        return True

    def _wait(self, state: State, number: int, keys: tuple[str, ...]) -> State:
        site = SITE[keys[0]]
        if (number, keys) in state.lines[site]:
            return state
        lines = [*state.lines]
        lines[site] = (*lines[site], (number, keys))
        return state._replace(lines=tuple(lines))

    def _leave(self, state: State, number: int) -> State:
        lines = tuple(tuple(place for place in line if place[0] != number) for line in state.lines)
        return state._replace(lines=lines)

    def _end(self, state: State, number: int) -> State:
        """Commit or drop the work. Its keys and places are free."""
        return self._leave(state, number)._replace(
            ended=state.ended | {number},
            claims=frozenset(each for each in state.claims if each[0] != number),
            intents=frozenset(each for each in state.intents if each[0] != number),
            unsaid=frozenset(each for each in state.unsaid if each[0] != number),
            patient=state.patient - {number},
        )


class Rank:
    """The order of sites, or its reverse."""

    def __init__(self, sign: int) -> None:
        self._sign = sign

    def __call__(self, key: str) -> int:
        return self._sign * SITE[key]
