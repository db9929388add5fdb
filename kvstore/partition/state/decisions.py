"""Decisions: the rows that say, at a transaction's home, that the transaction is committed. Decides only
(docs/protocol.md, Transactions).

A decision exists from the DECISION mutation, which commits the transaction, to the END mutation, which home logs when
all intents are resolved. A transaction without a decision is aborted, unless an attempt at it is under way. The bytes
of records follow the rules of intents.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstore.partition.state.intents import IntentName, decode_with
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.tokens import TokenSpan
from kvstore.proto.arrays import ArrayDecoder
from kvstore.ring.hashing import KeyHash

DECISIONS_MAX = 4096
"""Maximum number of decisions of a partition. Further transactions are refused with Overloaded."""


# docs/protocol.md Tx5
class DecisionRecord(NamedTuple):
    """The contents of a DECISION mutation. The mutation's key is the home key."""

    attempt: Attempt
    intents: tuple[IntentName, ...]
    """The intents that the transaction commits, in other partitions."""
    written_ms: int
    """Record time of the DECISION, in ms since 1970."""
    part: int = 0
    """Number of different keys that the transaction writes at home."""
    parts: int = 0
    """Number of different keys that the transaction writes, in all partitions."""
    mutations: int = 0
    """Number of mutations directly before the DECISION, in its entry, that are the transaction's."""


class Decision(NamedTuple):
    """A committed transaction whose intents are not all known to be resolved."""

    home: bytes
    """The home key."""
    seq: int
    """The sequence of the DECISION mutation."""
    record: DecisionRecord

    @property
    def attempt(self) -> Attempt:
        return self.record.attempt

    @property
    def intents(self) -> tuple[IntentName, ...]:
        """The intents that the transaction commits."""
        return self.record.intents

    def names(self, key: bytes, seq: int) -> bool:
        """Return True if the transaction commits the intent of this name."""
        return (key, seq) in self.record.intents


# docs/protocol.md Tx8
class EndRecord(NamedTuple):
    """The contents of an END mutation, which removes a decision. The mutation's key is the home key."""

    attempt: Attempt
    seq: int
    """The sequence of the decision."""


_decisions, _ends = ArrayDecoder(DecisionRecord), ArrayDecoder(EndRecord)


def decision_of(home: bytes, seq: int, data: bytes) -> Decision:
    """Return the decision of a DECISION mutation. Raises Corrupted."""
    return Decision(home, seq, decode_with(_decisions, data))


def end_of(data: bytes) -> EndRecord:
    """Decode the contents of an END mutation. Raises Corrupted."""
    return decode_with(_ends, data)


class Decisions:
    """The decisions whose home keys the partition owns."""

    def __init__(self, decisions: Iterable[Decision] = ()) -> None:
        self.by_attempt: dict[Attempt, Decision] = {}
        """Attempt → decision. Empty if no transaction is under way."""
        for each in decisions:
            self.add(each)

    def __len__(self) -> int:
        return len(self.by_attempt)

    def __iter__(self) -> Iterator[Decision]:
        """Iterate over all decisions, in the order of their arrival."""
        return iter(self.by_attempt.values())

    @property
    def is_full(self) -> bool:
        """True if the partition has as many decisions as it may have."""
        return len(self.by_attempt) >= DECISIONS_MAX

    def find(self, attempt: Attempt) -> Decision | None:
        """Return the decision of the attempt, or None."""
        return self.by_attempt.get(attempt)

    def commits(self, attempt: Attempt, key: bytes, seq: int) -> bool:
        """Return True if there is a decision of the attempt that names the intent."""
        found = self.by_attempt.get(attempt)
        return found is not None and found.names(key, seq)

    def within(self, hash: KeyHash, span: TokenSpan) -> list[Decision]:
        """Return the decisions whose home keys have tokens in `span`."""
        return [each for each in self.by_attempt.values() if span.holds(hash.token_of(each.home))]

    def add(self, decision: Decision) -> None:
        """Add a decision. Does nothing if the attempt's decision is known."""
        self.by_attempt.setdefault(decision.attempt, decision)

    def remove(self, attempt: Attempt) -> Decision | None:
        """Remove a decision and return it. Returns None if there is none of this attempt."""
        return self.by_attempt.pop(attempt, None)
