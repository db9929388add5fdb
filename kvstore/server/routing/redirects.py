"""Holds operations that were sent to a partition that does not own their key: it owned the key before, or will own it
soon. The operations wait here and are sent again when the ring has changed, or a little later. Their number, bytes and
waiting time are limited. Decides only.

Operations on one key are sent in their order of arrival. An operation waits behind earlier operations on its key that
are held here. It also waits behind operations on its key that are in transit to a former owner of the key, because they
may be refused and come back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvstore.errors import Overloaded, StoreError, Unavailable
from kvstore.partition.state.commands import Op, Sink, WrappedSink
from kvstore.partition.state.traits import UNORDERED
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import Pending, keys_of, written_bytes
from kvstore.server.routing.waiting_lines import by_order

WAIT_S = 2.0
"""Seconds for which this server tries to route an operation, over all attempts."""
ON_ITS_WAY = "the key is moving from one partition to another"


class Redirected(WrappedSink):
    """The sink of a redirected operation. If a local replica rejects the operation again, it knows only this sink,
    so the sink stores the deadline and the position in the order. With a new position, the operation would be sent
    after operations that arrived later but were rejected earlier."""

    __slots__ = ("deadline", "place")

    def __init__(self, sink: Sink, deadline: float) -> None:
        super().__init__(sink)
        self.deadline, self.place = deadline, 0


class _Expected(NamedTuple):
    """A write that is in transit to a former owner of its keys and may be refused and come back."""

    flight: Flight
    number: int
    keys: list[bytes]


class Redirects:
    """The redirected operations of one server. `fail` completes an operation with an error."""

    def __init__(self, fail: Callable[[Sink, int, StoreError], None], *, operations_max: int, bytes_max: int) -> None:
        self._fail, self._operations_max, self._bytes_max = fail, operations_max, bytes_max
        self._items: list[Pending] = []
        self.bytes = 0
        self._expected: dict[int, _Expected] = {}
        """Writes that may come back, by their position in the order."""
        self.keys: dict[bytes, int] = {}
        """The held keys with the number of operations on each: operations that wait here or may come back. A later
        write on a held key must wait here."""
        self.total = 0

    def __len__(self) -> int:
        return len(self._items)

    def holds(self, op: Op) -> bool:
        """Return True if the operation must wait behind another one that waits here or may come back."""
        return any(key in self.keys for key in keys_of(op))

    def expect(self, flight: Flight, numbers: Iterable[int]) -> None:
        """Record operations in transit that may come back. No later operation on their keys is sent before them."""
        for number in numbers:
            pending = flight.pending[number][1]
            if pending.op.code not in UNORDERED:
                keys = keys_of(pending.op)
                if pending.order not in self._expected:
                    self._hold(keys)
                self._expected[pending.order] = _Expected(flight, number, keys)

    def add(self, pending: Pending, now: float) -> None:
        """Hold the operation until its deadline, or for WAIT_S seconds if it has none. Fails it if its time is over
        or a limit is reached."""
        if not isinstance(pending.sink, Redirected):
            pending.sink = Redirected(pending.sink, pending.deadline or now + (pending.left_s or WAIT_S))
        pending.deadline = pending.sink.deadline
        size = written_bytes(pending.op)
        if pending.deadline <= now:
            self._fail(pending.sink, pending.token, Unavailable(ON_ITS_WAY))
        elif len(self._items) >= self._operations_max or self.bytes + size > self._bytes_max:
            error = Overloaded(f"{len(self._items)} operations wait for keys that are moving; retry later")
            self._fail(pending.sink, pending.token, error)
        else:
            self.total += 1
            self.bytes += size
            self._hold(keys_of(pending.op))
            insort(self._items, pending, key=by_order)

    def take(self, now: float) -> list[Pending]:
        """Remove and return the operations that can be sent again, in order. Operations that must wait for another
        one that may come back stay. Overdue operations are refused. An operation that comes back keeps its position."""
        self._forget_settled()
        blocked = {key for each in self._expected.values() for key in each.keys}
        going: list[Pending] = []
        staying: list[Pending] = []
        for pending in self._items:
            keys = keys_of(pending.op)
            is_late = pending.deadline <= now
            if not (is_late or blocked.isdisjoint(keys)):
                blocked.update(keys)
                staying.append(pending)
                continue
            self.bytes -= written_bytes(pending.op)
            self._release(keys)
            if is_late:
                self._fail(pending.sink, pending.token, Unavailable(ON_ITS_WAY))
            else:
                going.append(pending)
        self._items = staying
        return going

    def fail_all(self, error: StoreError) -> None:
        """Fail all operations with the error."""
        items, self._items, self._expected, self.bytes = self._items, [], {}, 0
        self.keys.clear()
        for pending in items:
            self._fail(pending.sink, pending.token, error)

    def _forget_settled(self) -> None:
        over = [order for order, each in self._expected.items() if each.number not in each.flight.pending]
        for order in over:
            self._release(self._expected.pop(order).keys)

    def _hold(self, keys: list[bytes]) -> None:
        for key in keys:
            self.keys[key] = self.keys.get(key, 0) + 1

    def _release(self, keys: list[bytes]) -> None:
        for key in keys:
            left = self.keys[key] - 1
            if left:
                self.keys[key] = left
            else:
                del self.keys[key]

    def check(self) -> None:
        held: dict[bytes, int] = {}
        for keys in [*(keys_of(each.op) for each in self._items), *(each.keys for each in self._expected.values())]:
            for key in keys:
                held[key] = held.get(key, 0) + 1
        assert self.keys == held
        assert self._items == sorted(self._items, key=by_order)
        assert self.bytes == sum(written_bytes(pending.op) for pending in self._items)
        assert len(self._items) <= self._operations_max
