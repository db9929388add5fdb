"""The records of transactions, and the state that a partition has after a part of its log (tests/models/txn.py)."""

from __future__ import annotations

from typing import NamedTuple

from tests.models.txn_rules import Rules

FIRST, PLAIN, EXPIRED, ABSENT = 0, 8, 9, -1
"""The first value of a key, and its value after a plain write, after its expiry, and after a transaction deleted it.
All values but ABSENT are versions, which never come again."""


class Part(NamedTuple):
    """The part of a transaction that concerns one key."""

    reads: bool
    writes: bool
    deletes: bool = False


class Txn(NamedTuple):
    """A transaction. A part is None if the transaction does not touch the key."""

    home: int
    """The first written key."""
    parts: tuple[Part | None, ...]


class Attempt(NamedTuple):
    """The name of an attempt: the transaction's number, and a number that no other attempt of the transaction has. In
    the store: partition, epoch and count."""

    txn: int
    number: int

    def __repr__(self) -> str:
        return f"{self.txn + 1}.{self.number}"


Names = tuple[tuple[int, int], ...]
"""The intents that a decision names: key and sequence."""

# The last field tells apart records of equal fields, because a NamedTuple equals any tuple of its values.


class Intent(NamedTuple):
    """INTENT: the effect of an attempt on one key. Its sequence is its name."""

    attempt: Attempt
    key: int
    kind: str = "INTENT"


class Decide(NamedTuple):
    """DECIDE: the decision, home's own effects and the request's result."""

    attempt: Attempt
    names: Names
    own: tuple[int, ...]
    """The keys of home's own part."""
    kind: str = "DECIDE"


class Resolve(NamedTuple):
    """RESOLVE: one intent goes, with or without its effect."""

    key: int
    attempt: Attempt
    name: int
    commit: bool
    kind: str = "RESOLVE"


class End(NamedTuple):
    """END: the decision goes."""

    attempt: Attempt
    kind: str = "END"


class Write(NamedTuple):
    """A plain write, or the deletion of an expired key."""

    key: int
    value: int
    kind: str = "WRITE"


class Mark(NamedTuple):
    """MARK of a pin. `keeps` is False if the position is not kept."""

    pin: int
    keeps: bool
    kind: str = "MARK"


class Freeze(NamedTuple):
    """FREEZE of a key's range."""

    key: int
    kind: str = "FREEZE"


class Release(NamedTuple):
    """RELEASE of a key's range."""

    key: int
    kind: str = "RELEASE"


class Own(NamedTuple):
    """OWN of a key's range, with its rows as they were at the freeze."""

    key: int
    value: int
    intents: tuple[Standing, ...]
    rows: frozenset[Decision]
    results: frozenset[int]
    sequence: int
    """The sequence of RELEASE."""
    kind: str = "OWN"


Record = Intent | Decide | Resolve | End | Write | Mark | Freeze | Release | Own
Log = tuple[Record, ...]


class Standing(NamedTuple):
    """An intent that is on a key."""

    key: int
    attempt: Attempt
    exclusive: bool
    name: int


class Decision(NamedTuple):
    """The row of a decision."""

    attempt: Attempt
    names: Names


class Folded(NamedTuple):
    """A partition's state after a part of its log."""

    values: tuple[int | None, ...]
    """None if the partition does not own the key."""
    intents: tuple[Standing, ...] = ()
    rows: frozenset[Decision] = frozenset()
    results: frozenset[int] = frozenset()
    """The transactions that are done, of home keys that are owned here."""
    frozen: tuple[int, ...] = ()
    mark: int = 0
    """The highest pin."""
    sequence: int = 0

    def owns(self, key: int) -> bool:
        return self.values[key] is not None

    def on(self, key: int) -> tuple[Standing, ...]:
        return tuple(intent for intent in self.intents if intent.key == key)

    def is_exclusive(self, key: int) -> bool:
        return any(intent.exclusive for intent in self.on(key))


def with_value(values: tuple[int | None, ...], key: int, value: int | None) -> tuple[int | None, ...]:
    return (*values[:key], value, *values[key + 1 :])


def written(txn: int, part: Part) -> int:
    """Return the value of a key that the transaction has written or deleted."""
    return ABSENT if part.deletes else 1 + txn


def apply(state: Folded, record: Record, txns: tuple[Txn, ...], rules: Rules) -> Folded:
    """Return the state after one more record."""
    state = state._replace(sequence=state.sequence + 1)
    match record:
        case Intent(attempt, key):
            part = txns[attempt.txn].parts[key]
            if part is None or not state.owns(key) or not (part.writes or rules.shared):
                return state
            return state._replace(intents=(*state.intents, Standing(key, attempt, part.writes, state.sequence)))
        case Decide(attempt, names, own):
            values = state.values
            for key in own:
                part = txns[attempt.txn].parts[key]
                if part is not None and part.writes and state.owns(key):
                    values = with_value(values, key, written(attempt.txn, part))
            rows = state.rows | {Decision(attempt, names)} if names else state.rows
            results = state.results | {attempt.txn} if rules.result_with_decide else state.results
            return state._replace(values=values, rows=rows, results=results)
        case Resolve(key, attempt, name, commit):
            hit = [each for each in state.on(key) if each.attempt == attempt and each.name == name]
            state = state._replace(intents=tuple(each for each in state.intents if each not in hit))
            part = txns[attempt.txn].parts[key]
            if not (hit and commit and hit[0].exclusive and part is not None):
                return state
            return state._replace(values=with_value(state.values, key, written(attempt.txn, part)))
        case End(attempt):
            return state._replace(rows=frozenset(row for row in state.rows if row.attempt != attempt))
        case Write(key, value):
            return state._replace(values=with_value(state.values, key, value))
        case Mark(pin, _):
            return state._replace(mark=max(state.mark, pin))
        case Freeze(key):
            return state._replace(frozen=(*state.frozen, key))
        case Release(key):
            return state._replace(
                values=with_value(state.values, key, None),
                frozen=tuple(each for each in state.frozen if each != key),
                intents=tuple(intent for intent in state.intents if intent.key != key),
                rows=frozenset(row for row in state.rows if txns[row.attempt.txn].home != key),
                results=frozenset(txn for txn in state.results if txns[txn].home != key),
            )
        case Own(key, value, intents, rows, results, sequence):
            return state._replace(
                sequence=max(state.sequence, sequence + 1 if rules.raised else 0),
                values=with_value(state.values, key, value),
                intents=state.intents + intents,
                rows=state.rows | rows,
                results=state.results | results,
            )
