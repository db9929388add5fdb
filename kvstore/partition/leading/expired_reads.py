"""Reads that meet keys past their expiry which record time has not reached: they wait until that is so, mostly because
deletes are logged. Decides only.

What comes on such a key meanwhile waits behind them: the key may be written anew, and no read tells less than one
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstore.errors import NotLeader, StoreError, Unavailable
from kvstore.partition.leading.answers import Answers
from kvstore.partition.leading.queries import EXPIRED_MAX
from kvstore.partition.leading.read_lines import Read
from kvstore.partition.state.commands import Result, Sink
from kvstore.types import PartitionId


class _Waiting(NamedTuple):
    since: float
    now_ms: int
    """Its keys were past their expiry by this time."""
    read: Read


class ExpiredReads:
    """The reads of one leadership that wait for deletes. `reap(keys, sink)` asks the leader to log these, and completes
    `sink` then; `read_again` gets back what need not wait any more."""

    def __init__(
        self,
        partition: PartitionId,
        answers: Answers,
        reap: Callable[[list[bytes], Sink], None],
        read_again: Callable[[list[Read]], None],
    ) -> None:
        self._partition, self._answers = partition, answers
        self._reap, self._read_again = reap, read_again
        self.count = 0
        """How many wait. A plain attribute: it is looked at in each turn."""
        self.by_key: dict[bytes, list[_Waiting]] = {}
        """The reads of one key, by the keys whose deletes are under way; in the order in which these were asked for."""
        self._ranges: dict[int, _Waiting] = {}
        """Reads of ranges, in the order of coming."""
        self._came = 0

    def add(self, read: Read, now: float, now_ms: int) -> None:
        """Let a read of one key wait, which is past its expiry by `now_ms`, or has reads that wait already."""
        self.count += 1
        key, each = read[0][1], _Waiting(now, now_ms, read)
        waiting = self.by_key.get(key)
        if waiting is not None:
            waiting.append(each)
            return
        waiting = self.by_key[key] = [each]
        self._reap([key], _Deletes(partial(self._key_ended, key, waiting)))

    def add_range(self, read: Read, keys: list[bytes], now: float, now_ms: int) -> None:
        """Let a read of a range wait for the deletes of the first of these keys; it finds out whether more are
        needed."""
        self.count += 1
        self._came += 1
        self._ranges[self._came] = _Waiting(now, now_ms, read)
        self._reap(keys[:EXPIRED_MAX], _Deletes(partial(self._range_ended, self._came)))

    # docs/protocol.md P10
    def expire(self, before: float) -> None:
        """Refuse what has waited since `before`. Its deletes go on, and what comes on these keys waits for them."""
        late: list[_Waiting] = []
        for waiting in self.by_key.values():
            late += [each for each in waiting if each.since < before]
            waiting[:] = [each for each in waiting if each.since >= before]
        for number in [number for number, each in self._ranges.items() if each.since < before]:
            late.append(self._ranges.pop(number))
        self.count -= len(late)
        error = Unavailable(f"partition {self._partition}: the delete of an expired key was not logged in time")
        for _, _, (_, sink, token) in late:
            self._answers.give(sink, token, error)

    # docs/protocol.md P4
    def rise(self, record_time_ms: int) -> None:
        """Read again those whose keys are absent by record time now: that needs no delete."""
        for key, waiting in [*self.by_key.items()]:
            if waiting and waiting[0].now_ms > record_time_ms:
                break
            if waiting:
                self._key_ended(key, waiting, None)
        for number, each in [*self._ranges.items()]:
            if each.now_ms <= record_time_ms:
                self._range_ended(number, None)

    def _key_ended(self, key: bytes, waiting: list[_Waiting], error: StoreError | None) -> None:
        """The delete of the key is logged, or is not needed, or will never be."""
        if self.by_key.get(key) is waiting:
            del self.by_key[key]
            self._end(waiting, error)

    def _range_ended(self, number: int, error: StoreError | None) -> None:
        each = self._ranges.pop(number, None)
        if each is not None:
            self._end([each], error)

    def _end(self, waiting: list[_Waiting], error: StoreError | None) -> None:
        self.count -= len(waiting)
        reads = [each.read for each in waiting]
        if error is None:
            self._read_again(reads)
            return
        if not isinstance(error, Unavailable):  # a read has no unknown outcome
            error = NotLeader(self._partition)
        self._answers.fail_all(reads, error)


class _Deletes(Sink):
    """The sink of deletes that reads wait for. `then` is told how they failed, or None."""

    def __init__(self, then: Callable[[StoreError | None], None]) -> None:
        self._then = then

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._then(result if isinstance(result, StoreError) else None)

    def flush(self) -> None:
        """The reads have sinks of their own."""
