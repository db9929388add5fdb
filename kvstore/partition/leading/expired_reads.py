"""Holds reads of keys that have expired by the leader's clock while record time has not reached the expiry. Such reads
wait until record time passes the expiry, usually because the leader logs the deletes. Decides only.

Later reads of such a key wait behind the earlier ones. Otherwise, if the key is written again, a later read could
return an older state than an earlier read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvstore.errors import NotLeader, StoreError, Unavailable
from kvstore.partition.leading.answers import ResultDelivery
from kvstore.partition.leading.queries import EXPIRED_MAX
from kvstore.partition.leading.read_lines import Read
from kvstore.partition.state.commands import Result, Sink
from kvstore.types import PartitionId


class _ExpiredRead(NamedTuple):
    since: float
    now_ms: int
    """The time by which its keys were past their expiry."""
    read: Read


class ExpiredReads:
    """The reads of one leadership that wait for deletes of expired keys. `reap(keys, sink)` asks the leader to log the
    deletes and completes `sink` afterwards. `read_again` receives the reads that no longer have to wait."""

    def __init__(
        self,
        partition: PartitionId,
        answers: ResultDelivery,
        reap: Callable[[list[bytes], Sink], None],
        read_again: Callable[[list[Read]], None],
    ) -> None:
        self._partition, self._answers = partition, answers
        self._reap, self._read_again = reap, read_again
        self.count = 0
        """Number of reads that wait. A plain attribute, because it is checked in every turn."""
        self.by_key: dict[bytes, list[_ExpiredRead]] = {}
        """Reads of single keys, by the key whose delete is in flight, in the order in which the deletes were
        requested."""
        self._ranges: dict[int, _ExpiredRead] = {}
        """Reads of ranges, in the order of arrival."""
        self._came = 0

    def add(self, read: Read, now: float, now_ms: int) -> None:
        """Let a read of one key wait, because the key has expired at `now_ms` or because earlier reads of the key
        already wait."""
        self.count += 1
        key, each = read[0].key, _ExpiredRead(now, now_ms, read)
        waiting = self.by_key.get(key)
        if waiting is not None:
            waiting.append(each)
            return
        waiting = self.by_key[key] = [each]
        self._reap([key], _DeletesSink(partial(self._key_ended, key, waiting)))

    def add_range(self, read: Read, keys: list[bytes], now: float, now_ms: int) -> None:
        """Let a read of a range wait for the deletes of the first EXPIRED_MAX of `keys`. The read then runs again, and
        waits again if more keys have expired."""
        self.count += 1
        self._came += 1
        self._ranges[self._came] = _ExpiredRead(now, now_ms, read)
        self._reap(keys[:EXPIRED_MAX], _DeletesSink(partial(self._range_ended, self._came)))

    # docs/protocol.md P10
    def expire(self, before: float) -> None:
        """Refuse the reads that have waited since before `before`. The deletes continue, and new reads of these keys
        wait for them."""
        late: list[_ExpiredRead] = []
        for waiting in self.by_key.values():
            late += [each for each in waiting if each.since < before]
            waiting[:] = [each for each in waiting if each.since >= before]
        for number in [number for number, each in self._ranges.items() if each.since < before]:
            late.append(self._ranges.pop(number))
        self.count -= len(late)
        error = Unavailable(f"partition {self._partition}: the delete of an expired key was not logged in time")
        for _, _, (_, sink, token) in late:
            self._answers.deliver(sink, token, error)

    # docs/protocol.md P4
    def rise(self, record_time_ms: int) -> None:
        """Run those reads again whose keys are now absent without a delete, because record time has passed their
        expiry."""
        for key, waiting in [*self.by_key.items()]:
            if waiting and waiting[0].now_ms > record_time_ms:
                break
            if waiting:
                self._key_ended(key, waiting, None)
        for number, each in [*self._ranges.items()]:
            if each.now_ms <= record_time_ms:
                self._range_ended(number, None)

    def _key_ended(self, key: bytes, waiting: list[_ExpiredRead], error: StoreError | None) -> None:
        """Handle the end of a delete: it is logged, no longer needed, or will never be logged."""
        if self.by_key.get(key) is waiting:
            del self.by_key[key]
            self._end(waiting, error)

    def _range_ended(self, number: int, error: StoreError | None) -> None:
        each = self._ranges.pop(number, None)
        if each is not None:
            self._end([each], error)

    def _end(self, waiting: list[_ExpiredRead], error: StoreError | None) -> None:
        self.count -= len(waiting)
        reads = [each.read for each in waiting]
        if error is None:
            self._read_again(reads)
            return
        if not isinstance(error, Unavailable):  # a read has no unknown outcome
            error = NotLeader(self._partition)
        self._answers.fail_all(reads, error)


class _DeletesSink(Sink):
    """The sink of deletes that reads wait for. `then` receives the error, or None if the deletes are logged."""

    def __init__(self, then: Callable[[StoreError | None], None]) -> None:
        self._then = then

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._then(result if isinstance(result, StoreError) else None)

    def flush(self) -> None:
        """Do nothing, because the reads have their own sinks."""
