"""Holds back reads of keys that are locked by a transaction: keys with an exclusive intent, and expired keys with any
intent. Such reads wait until the intent has been resolved (docs/protocol.md Tx9). Decides only.

If such a read returned the value from before the intent, it could contradict an earlier read that has seen the
transaction. If it reported an expired key as absent, it could contradict the transaction, which has found the key
present.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from kvstore.errors import Overloaded, StoreError, Unavailable
from kvstore.partition.leading.answers import ResultDelivery
from kvstore.partition.leading.prepared_answers import YOUNG_MS, PreparedAnswers
from kvstore.partition.leading.read_lines import Proved, Read
from kvstore.partition.state.commands import Count, Op, ScanTokens
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.rows import data_key, expiry_of
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import Tokens
from kvstore.partition.state.traits import POINT_READS


class _HeldRead(NamedTuple):
    since: float
    read: Read


class HeldReads:
    """The reads of one leadership that wait for transactions. `wait_for` receives the intents for which reads wait, and
    `read_again` receives the reads that no longer have to wait. At most `most` reads wait; further ones are refused
    with Overloaded. Other reads have their own limit, so that one key does not block the reads of all others."""

    def __init__(
        self,
        state: ReplicaState,
        answers: ResultDelivery,
        read_again: Callable[[list[Read]], None],
        most: int,
    ) -> None:
        self._state, self._answers, self._read_again, self._most = state, answers, read_again, most
        self.wait_for: Callable[[Iterable[Intent]], None] = lambda intents: None
        self.count = 0
        """Number of reads that wait. A plain attribute, because it is checked in every turn."""
        self._by_key: dict[bytes, list[_HeldRead]] = {}
        """Reads of single keys, by key."""
        self._ranges: list[_HeldRead] = []
        self.prepared: PreparedAnswers | None = None
        """The answers to PREPARE, which wait for reads. None if nobody prepares here."""

    def sift(self, reads: list[Read], now: float, now_ms: int, readable: Tokens) -> list[Read]:
        """Hold back the reads of single keys that have to wait, and return the others. `now_ms` is the time at which
        keys count as expired. Raises OSError if the engine cannot read."""
        by_key, token_of = self._state.intents.by_key, self._state.hash.token_of
        are_free = [
            (key := read[0].key) not in by_key
            or not readable.holds(token_of(key))
            or not (self._is_in_the_way(key) or self._has_expired(key, now_ms))
            for read in reads
        ]  # before any read is held, because an error concerns all of them
        for read, is_free in zip(reads, are_free, strict=True):
            if not is_free and not self._is_refused(read):
                held, key = _held_since(now, read), read[0].key
                self._by_key.setdefault(key, []).append(held)
                self._wait(held, key, key + b"\0", self._state.intents.at(key), now_ms)
        return list(compress(reads, are_free))

    def hold_range(self, read: Read, now: float, now_ms: int, readable: Tokens) -> bool:
        """Hold back a read of a range if it has to wait. Returns True if it waits or was refused. Raises OSError if the
        engine cannot read."""
        start, end, first = _range_of(read[0])
        intents = self._between(start, end, first, now_ms, readable)
        if not intents:
            return False
        if self._is_refused(read):
            return True
        held = _held_since(now, read)
        self._ranges.append(held)
        self._wait(held, start, end, intents, now_ms)
        return True

    def _wait(self, held: _HeldRead, start: bytes, end: bytes, intents: Sequence[Intent], now_ms: int) -> None:
        """Count a read of [start, end) that waits for these intents, and let PREPARED of later attempts wait for it."""
        self.count += 1
        self.wait_for(intents)
        if self.prepared is not None and now_ms - min(each.record.written_ms for each in intents) < YOUNG_MS:
            self.prepared.withhold(_name_of(held.read), start, end, held.since, intents)
        else:
            self.passed(held.read)

    def passed(self, read: Read) -> None:
        """Note that a read waits for transactions no longer, or that transactions must not wait for it."""
        if self.prepared is not None and self.prepared.reads:
            self.prepared.passed(_name_of(read))

    def _is_in_the_way(self, key: bytes) -> bool:
        """Return True if the key has an exclusive intent whose transaction may be committed."""
        intent = self._state.intents.exclusive.get(key)
        return intent is not None and (self.prepared is None or intent.name not in self.prepared.unsaid)

    def _is_refused(self, read: Read) -> bool:
        """Refuse the read and return True if too many reads wait."""
        if self.count < self._most:
            return False
        self.passed(read)
        self._answers.deliver(read[1], read[2], Overloaded(f"{self.count} reads wait for transactions; retry later"))
        return True

    def _between(self, start: bytes, end: bytes, first: int, now_ms: int, readable: Tokens) -> list[Intent]:
        found, token_of = self._state.intents, self._state.hash.token_of
        return [
            intent
            for key, of_key in found.by_key.items()
            if start <= key
            and (not end or key < end)
            and readable.holds(token := token_of(key))
            and token >= first
            and (self._is_in_the_way(key) or self._has_expired(key, now_ms))
            for intent in of_key.values()
        ]

    def _has_expired(self, key: bytes, now_ms: int) -> bool:
        row = self._state.engine.get(data_key(self._state.hash, key))
        return row is not None and 0 < expiry_of(row) <= now_ms

    def resolved(self, keys: Iterable[bytes]) -> None:
        """Repeat the reads that have waited for these keys, and all reads of ranges."""
        points = [each for key in dict.fromkeys(keys) for each in self._by_key.pop(key, ())]
        self._run_again(points)

    def release(self) -> None:
        """Repeat all reads, because the partition's tokens have changed."""
        if self.prepared is not None:
            self.prepared.moved()
        points = [each for waiting in self._by_key.values() for each in waiting]
        self._by_key.clear()
        self._run_again(points)

    def _run_again(self, points: list[_HeldRead]) -> None:
        reads = [*map(_released, points), *map(_released, self._ranges)]
        self._ranges.clear()
        self.count -= len(reads)
        if reads:
            self._read_again(reads)

    # docs/protocol.md P10
    def expire(self, before: float) -> None:
        """Refuse the reads that have waited since before `before`."""
        late = [each for each in self._ranges if each.since < before]
        self._ranges = [each for each in self._ranges if each.since >= before]
        for key, waiting in [*self._by_key.items()]:
            late += [each for each in waiting if each.since < before]
            self._by_key[key] = [each for each in waiting if each.since >= before]
            if not self._by_key[key]:
                del self._by_key[key]
        self.count -= len(late)
        for each in late:
            self.passed(each.read)
        error = Unavailable(f"partition {self._state.partition}: a transaction on the key was not resolved in time")
        self._answers.fail_all((each.read for each in late), error)

    def stop(self, error: StoreError) -> None:
        """Refuse all reads with this error."""
        held = [each.read for waiting in self._by_key.values() for each in waiting]
        held += [each.read for each in self._ranges]
        self._by_key.clear()
        self._ranges.clear()
        self.count = 0
        if self.prepared is not None:
            self.prepared.stop()
        self._answers.fail_all(held, error)


def _name_of(read: Read) -> tuple[int, int]:
    """Return a name of the read, by its sink and its token."""
    return id(read[1]), read[2]


# docs/protocol.md P10, Tx9
def _held_since(now: float, read: Read) -> _HeldRead:
    """Return the held read. If it has already waited for another transaction, that time counts, so that a sequence of
    transactions cannot hold it forever."""
    return _HeldRead((read.since if isinstance(read, Proved) else 0.0) or now, read)


def _released(held: _HeldRead) -> Read:
    """Return the read, to be repeated. It needs no new proof, because it was proved before it had to wait."""
    read = Proved(held.read)
    read.since = held.since
    return read


# docs/protocol.md Tx12
def is_undecided(state: ReplicaState, op: Op) -> bool:
    """Return True if a transaction writes a key that the read covers, and the state does not contain its outcome. A
    session may have seen the outcome, so a replica must not answer its reads from this state."""
    exclusive = state.intents.exclusive
    if not exclusive:
        return False
    if op.code in POINT_READS:
        return op.key in exclusive
    start, end, first = _range_of(op)
    token_of = state.hash.token_of
    return any(
        token_of(each.key) >= first for each in state.intents.exclusive_between(state.hash, start, end, op.assigned)
    )


def _range_of(op: Op) -> tuple[bytes, bytes, int]:
    """Return the start and the end of the keys that a read of a range covers, and the first token."""
    if isinstance(op, ScanTokens):
        return b"", b"", op.token
    return (b"", b"", 0) if isinstance(op, Count) else (op.key, getattr(op, "end", b""), 0)
