"""Operations that came to a partition which does not own their key (any more, or yet): they wait here, bounded in
number, bytes and time, and go out again when the ring has changed, or a little later. Decides only.

Operations on one key go out in the order in which they came: what comes while one on the same key is here waits behind
it. So does what comes while one is still under way to a former owner of the key, which may send it back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from operator import itemgetter

from kvstore.errors import Moved, NotLeader, Overloaded, StoreError, Unavailable
from kvstore.partition.commands import Op, Result, Sink
from kvstore.server.ways import UNORDERED, UnderWay, Waiting, keys_of, written_bytes
from kvstore.types import PartitionId

WAIT_S = 2.0
"""How long an operation is looked after, all its ways together."""
ON_ITS_WAY = "the key is on its way from one partition to another"


class FromPeer(Sink):
    """Base of sinks of other servers: those send out again themselves what was theirs to send."""

    def turn_away(self, op: Op, token: int, error: NotLeader | Moved) -> None:
        """Instead of `complete`, also from inside `submit`: nothing that comes behind the operation is done any more,
        until the other server has heard of this."""
        raise NotImplementedError


class Astray:
    """The sink of such an operation: knows until when it is worth trying, and what place it got when it was turned away
    here for the first time: another time whatever came behind it may be turned away before it."""

    __slots__ = ("_sink", "deadline", "place")

    def __init__(self, sink: Sink, deadline: float) -> None:
        self._sink, self.deadline = sink, deadline
        self.place = 0

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._sink.complete(token, result)

    def flush(self) -> None:
        self._sink.flush()


class Strays:
    """`fail` refuses an operation on a later turn of the event loop."""

    def __init__(self, fail: Callable[[Sink, int, StoreError], None], *, most: int, bytes_max: int) -> None:
        self._fail, self._most, self._bytes_max = fail, most, bytes_max
        self._items: list[Waiting] = []
        self._bytes = 0
        self._expected: dict[int, tuple[Callable[[], bool], list[bytes]]] = {}
        """By their place in the order."""
        self.keys: dict[bytes, int] = {}
        """Of what is here or expected back → of how many. What comes later on one of them has to wait here."""
        self.total = 0

    def __len__(self) -> int:
        return len(self._items)

    def holds(self, op: Op) -> bool:
        """Whether the operation has to wait behind one that is here or expected."""
        return any(key in self.keys for key in keys_of(op))

    def expect(self, under_way: Iterable[UnderWay]) -> None:
        """Operations that may come back, and before which no later one on their keys must be done."""
        for is_under_way, order, op in under_way:
            if op[0] not in UNORDERED:
                keys = keys_of(op)
                if order not in self._expected:
                    self._hold(keys)
                self._expected[order] = (is_under_way, keys)

    def add(self, stray: Waiting, now: float) -> None:
        """Keep the operation for a while: until its deadline, if it has one."""
        order, op, sink, token, deadline, _ = stray
        if not isinstance(sink, Astray):
            sink = Astray(sink, deadline or now + WAIT_S)
        size = written_bytes(op)
        if sink.deadline <= now:
            self._fail(sink, token, Unavailable(ON_ITS_WAY))
        elif len(self._items) >= self._most or self._bytes + size > self._bytes_max:
            self._fail(sink, token, Overloaded(f"{len(self._items)} operations wait for keys that are on their way"))
        else:
            self.total += 1
            self._bytes += size
            self._hold(keys_of(op))
            insort(self._items, (order, op, sink, token, sink.deadline, False), key=itemgetter(0))

    def take(self, now: float) -> list[Waiting]:
        """What goes out again, in order: all but what has to wait for something that is expected, and is refused when
        its time is up. Those that come back keep their place."""
        self._forget_what_has_come()
        blocked = {key for _, keys in self._expected.values() for key in keys}
        going: list[Waiting] = []
        staying: list[Waiting] = []
        for stray in self._items:
            keys = keys_of(stray[1])
            is_late = stray[4] <= now
            if not (is_late or blocked.isdisjoint(keys)):
                blocked.update(keys)
                staying.append(stray)
                continue
            self._bytes -= written_bytes(stray[1])
            self._let_go(keys)
            if is_late:
                self._fail(stray[2], stray[3], Unavailable(ON_ITS_WAY))
            else:
                going.append(stray)
        self._items = staying
        return going

    def fail_all(self, error: StoreError) -> None:
        """Refuse all of them."""
        items, self._items, self._expected, self._bytes = self._items, [], {}, 0
        self.keys.clear()
        for _, _, sink, token, _, _ in items:
            self._fail(sink, token, error)

    def _forget_what_has_come(self) -> None:
        for order in [order for order, (is_under_way, _) in self._expected.items() if not is_under_way()]:
            self._let_go(self._expected.pop(order)[1])

    def _hold(self, keys: list[bytes]) -> None:
        for key in keys:
            self.keys[key] = self.keys.get(key, 0) + 1

    def _let_go(self, keys: list[bytes]) -> None:
        for key in keys:
            left = self.keys[key] - 1
            if left:
                self.keys[key] = left
            else:
                del self.keys[key]


class WritesByKey:
    """Of those under way on one link: which are on keys of one that has come back. Looks at each once, and not before
    something comes back."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, list[int]] = {}
        self._looked_up_to = 0

    def on(self, keys: set[bytes], pending: dict[int, tuple[PartitionId, Waiting]]) -> list[int]:
        """Numbers of writes on these keys, `pending` being in the order of its numbers. Each key's are told once: more
        come only when all of these have come back."""
        for number in reversed(pending):
            if number <= self._looked_up_to:
                break
            op = pending[number][1][1]
            if op[0] not in UNORDERED:
                for key in keys_of(op):
                    self._numbers.setdefault(key, []).append(number)
        self._looked_up_to = next(reversed(pending), self._looked_up_to)
        return sorted({each for key in keys for each in self._numbers.pop(key, ()) if each in pending})

    def clear(self) -> None:
        """Forget: what is under way is looked at again if something comes back."""
        self._numbers.clear()
        self._looked_up_to = 0
