"""Delivers a participant's answers to PREPARE, and withholds them for a moment while reads wait. So reads are
answered under steady transactions (docs/protocol.md Tx9). Decides only.

A transaction cannot be committed before every participant has said PREPARED. So a read need not wait for an intent
whose PREPARED has not been said: the record under the intent is the current one. While a read waits for earlier
intents, PREPARED of later attempts on its keys is withheld, so that the read waits for fewer and fewer intents.

*Later* is by one order of all attempts: by when they began, then by name. Otherwise reads in two partitions could each
withhold the PREPARED for which the other one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvstore.errors import OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Reply, Result, Sink, WrappedSink
from kvstore.partition.state.intents import Intent
from kvstore.partition.state.internal import Attempt

WITHHELD_S = 0.5
"""Seconds for which one read may withhold PREPARED. Home waits 2 s for it."""
YOUNG_MS = 1_000
"""A read withholds nothing if it waits for an intent older than this. The home of such an intent may have no leader,
and other transactions must not wait for that."""

Order = tuple[int, Attempt]
"""The place of an attempt in the order of all attempts."""
Name = tuple[bytes, int]
"""The key and the sequence of an intent."""


class _WaitingRead(NamedTuple):
    """A read of [start, end) that waits for intents. An empty `end` means up to the last key."""

    start: bytes
    end: bytes
    newest: Order
    """The last attempt for which the read waits."""
    until: float

    def is_before(self, key: bytes, order: Order) -> bool:
        """Return True if an attempt on the key must wait for this read."""
        return order > self.newest and self.start <= key and (not self.end or key < self.end)


class PreparedAnswers:
    """The answers to PREPARE of one leadership. `now` returns the clock in seconds, `deliver` passes a result to a
    sink, and `set_timer(seconds)` lets `expire` be called after that time."""

    def __init__(
        self,
        now: Callable[[], float],
        deliver: Callable[[Sink, int, Result | StoreError], None],
        set_timer: Callable[[float], object],
    ) -> None:
        self._now, self._deliver, self._set_timer = now, deliver, set_timer
        self._orders: dict[Name, Order] = {}
        """The attempts of the intents that this leadership has logged."""
        self.unsaid: set[Name] = set()
        """The intents whose PREPARED has not been said."""
        self.reads: dict[tuple[int, int], _WaitingRead] = {}
        """The reads for which PREPARED may be withheld, by sink and token."""
        self._withheld: list[Reply] = []

    def sink(self, sink: Sink) -> Sink:
        """Return the sink through which the answer to a PREPARE is delivered."""
        return _PreparedSink(self, sink)

    def note(self, names: Iterable[Name], order: Order) -> None:
        """Note the intents of a PREPARE, before it is answered."""
        self.unsaid.update(names)
        self._orders.update(dict.fromkeys(names, order))

    def forget(self, intents: Iterable[Intent]) -> None:
        """Forget intents that are resolved."""
        for intent in intents:
            self._orders.pop(intent.name, None)
            self.unsaid.discard(intent.name)

    def offer(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        """Deliver an answer to PREPARE, or withhold it."""
        if self._is_withheld(result):
            self._withheld.append((sink, token, result))
        else:
            self._give_prepared(result)
            sink.complete(token, result)

    def _is_withheld(self, result: Any) -> bool:
        if not self.reads or isinstance(result, StoreError) or not self.unsaid.issuperset(result[1]):
            return False  # no read waits, or it has been said before
        now = self._now()
        reads = [each for each in self.reads.values() if each.until > now]
        return any(each.is_before(name[0], self._orders[name]) for each in reads for name in result[1])

    def _give_prepared(self, result: Any) -> None:
        if not isinstance(result, StoreError):
            self.unsaid.difference_update(result[1])

    def withhold(
        self, read: tuple[int, int], start: bytes, end: bytes, since: float, intents: Sequence[Intent]
    ) -> None:
        """Withhold PREPARED of later attempts in [start, end) while a read waits for these intents. `read` names the
        read, which began to wait at `since`."""
        until = since + WITHHELD_S
        if until > self._now() and self.unsaid.isdisjoint(each.name for each in intents):
            newest = max(self._orders.get(each.name, (0, each.attempt)) for each in intents)
            self.reads[read] = _WaitingRead(start, end, newest, until)
            self._set_timer(WITHHELD_S)
        else:
            self.passed(read)

    def passed(self, read: tuple[int, int]) -> None:
        """Withhold nothing more for this read."""
        if self.reads.pop(read, None) is not None:
            self._release()

    def expire(self) -> None:
        """Withhold nothing more for reads that have done so for WITHHELD_S."""
        now = self._now()
        self.reads = {read: each for read, each in self.reads.items() if each.until > now}
        if self.reads:
            self._set_timer(WITHHELD_S)
        self._release()

    def _release(self) -> None:
        withheld, self._withheld = self._withheld, []
        for reply in withheld:
            if self._is_withheld(reply[2]):
                self._withheld.append(reply)
            else:
                self._give_prepared(reply[2])
                self._deliver(*reply)

    # docs/protocol.md Tx9, Tx14
    def moved(self) -> None:
        """Count PREPARED of all intents as sent, because the partition owns other tokens. The next owner of a range
        may send PREPARED, and then the range may come back."""
        self.unsaid.clear()
        self._orders.clear()
        self._release()

    def stop(self) -> None:
        """Fail what is withheld, because the leadership has ended. The next leader can return these answers."""
        self.reads.clear()
        withheld, self._withheld = self._withheld, []
        for sink, token, _ in withheld:
            self._deliver(sink, token, OutcomeUnknown("the leader was lost before it said PREPARED"))


class _PreparedSink(WrappedSink):
    """The sink of one PREPARE."""

    __slots__ = ("_answers",)

    def __init__(self, answers: PreparedAnswers, sink: Sink) -> None:
        super().__init__(sink)
        self._answers = answers

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._answers.offer(self._sink, token, result)
