"""Queues operations until they are evaluated into an entry. The queue keeps their order, and is bounded in number and
bytes. Each operation keeps its arrival time wherever it waits (docs/protocol.md, P10). Decides only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter

import msgspec

from kvstore.partition.config import PartitionConfig
from kvstore.partition.leading.evaluate import Item
from kvstore.partition.state.commands import Op, Put, Sink
from kvstore.partition.state.operations import size_of

ITEM_BYTES = 64
"""Bytes counted for each operation besides its key and value."""
ENTRY_ITEMS_MAX = 1000
"""Maximum number of operations evaluated at once, which takes a few milliseconds."""

Arrived = tuple[float, Item]
"""An operation with its arrival time."""
_PUTS = {Put}
_key_of, _value_of = attrgetter("key"), attrgetter("value")


class QueuedBatch(msgspec.Struct, frozen=True):
    """Operations that are evaluated together."""

    items: list[Item]
    arrivals: list[tuple[float, int]]
    """Pairs of an arrival time and the number of operations that arrived then, in order."""

    def arrived(self, some: list[Item], now: float) -> list[Arrived]:
        """Return the items in `some`, which were not evaluated, with their arrival times. An item that is not in the
        batch continues one of its operations; that item's wait begins at `now`."""
        if not some:
            return []
        known = {id(item): at for at, item in _each(self.arrivals, self.items)}
        return [(known.get(id(item), now), item) for item in some]

    def each(self) -> list[QueuedBatch]:
        """Split the batch into batches of one operation each."""
        return [QueuedBatch([item], [(at, 1)]) for at, item in _each(self.arrivals, self.items)]


class WriteQueue:
    """The operations that wait for the next entry, in order of arrival."""

    def __init__(self, config: PartitionConfig) -> None:
        self.bytes = 0
        """Bytes queued. 0 only if nothing waits, because each operation counts at least ITEM_BYTES."""
        self._config = config
        self._items: deque[Item] = deque()
        self._arrivals: deque[tuple[float, int]] = deque()
        """Arrival time and number of the operations that arrived together, in the order of the items. Times need not
        rise: an operation that was put back may be older or newer than the one behind it."""
        self._unstamped = 0

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Item) -> bool:
        """Add the operation. Returns False if the queue has reached its limit of operations or bytes."""
        op, config = item[0], self._config
        size = _size(op)
        if len(self._items) >= config.queue_items_max or self.bytes + size > config.queue_bytes_max:
            return False
        self._items.append(item)
        self.bytes += size
        self._unstamped += 1
        return True

    def offer_puts(self, ops: Sequence[Op], sink: Sink, tokens: Sequence[int]) -> bool:
        """Add the operations of one sink if all are puts and all fit. Otherwise add none and return False."""
        count, config = len(ops), self._config
        try:
            if set(map(type, ops)) != _PUTS:
                return False
            size = ITEM_BYTES * count + sum(map(len, map(_key_of, ops))) + sum(map(len, map(_value_of, ops)))
        except (TypeError, AttributeError):
            return False  # one of them is malformed, and is refused when it is evaluated
        if len(self._items) + count > config.queue_items_max or self.bytes + size > config.queue_bytes_max:
            return False
        self._items.extend(zip(ops, repeat(sink), tokens))
        self.bytes += size
        self._unstamped += count
        return True

    def holds(self, kind: type[Op]) -> bool:
        """Return True if an operation of this class waits."""
        return any(op.__class__ is kind for op, _, _ in self._items)

    def put_back(self, arrived: list[Arrived]) -> None:
        """Put operations at the front of the queue, in this order."""
        for at, item in reversed(arrived):
            self._items.appendleft(item)
            self._arrivals.appendleft((at, 1))
            self.bytes += _size(item[0])

    def stamp(self, now: float) -> None:
        """Set the arrival time of all operations added since the last call."""
        if self._unstamped:
            self._arrivals.append((now, self._unstamped))
            self._unstamped = 0

    def take(self, now: float) -> QueuedBatch:
        """Remove and return the operations for the next entry."""
        self.stamp(now)
        if self.bytes <= self._config.entry_bytes_max and len(self._items) <= ENTRY_ITEMS_MAX:
            taken = QueuedBatch(list(self._items), list(self._arrivals))
            self._clear()
            return taken
        items: list[Item] = []
        size = 0
        while self._items and size < self._config.entry_bytes_max and len(items) < ENTRY_ITEMS_MAX:
            items.append(self._items.popleft())
            size += _size(items[-1][0])
        self.bytes -= size
        return QueuedBatch(items, self._take_arrivals(len(items)))

    def take_all(self, now: float) -> list[Arrived]:
        """Remove and return all operations."""
        self.stamp(now)
        found = list(_each(self._arrivals, self._items))
        self._clear()
        return found

    def take_older(self, before: float) -> list[Item]:
        """Remove and return the operations that arrived before `before`."""
        if not any(at < before for at, _ in self._arrivals):
            return []
        late: list[Item] = []
        items, arrivals = self._items, self._arrivals
        self._items, self._arrivals = deque(), deque()
        for at, together in arrivals:
            some = [items.popleft() for _ in range(together)]
            if at < before:
                late += some
                self.bytes -= sum(_size(op) for op, _, _ in some)
            else:
                self._items.extend(some)
                self._arrivals.append((at, together))
        self._items.extend(items)  # unstamped
        return late

    def _clear(self) -> None:
        self._items.clear()
        self._arrivals.clear()
        self.bytes = self._unstamped = 0

    def _take_arrivals(self, count: int) -> list[tuple[float, int]]:
        taken: list[tuple[float, int]] = []
        while count:
            at, together = self._arrivals.popleft()
            if together > count:
                self._arrivals.appendleft((at, together - count))
                together = count
            taken.append((at, together))
            count -= together
        return taken


class FrozenWrites:
    """The operations that wait until their range is no longer frozen, in order. Bounded like the queue."""

    def __init__(self, config: PartitionConfig) -> None:
        self.bytes = 0
        self._config = config
        self._items: deque[tuple[float, Item, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, arrived: Arrived) -> bool:
        """Add the operation. Returns False if the limit of operations or bytes is reached."""
        at, item = arrived
        size = _size(item[0])
        config = self._config
        if len(self._items) >= config.queue_items_max or self.bytes + size > config.queue_bytes_max:
            return False
        self._items.append((at, item, size))
        self.bytes += size
        return True

    @property
    def operations(self) -> list[Op]:
        """The operations that wait, in order."""
        return [item[0] for _, item, _ in self._items]

    def take_all(self) -> list[Arrived]:
        """Remove and return all operations."""
        found = [(at, item) for at, item, _ in self._items]
        self._items.clear()
        self.bytes = 0
        return found

    def take_older(self, before: float) -> list[Item]:
        """Remove and return the operations that arrived before `before`."""
        late = [(item, size) for at, item, size in self._items if at < before]
        if late:
            self._items = deque(each for each in self._items if each[0] >= before)
            self.bytes -= sum(size for _, size in late)
        return [item for item, _ in late]


def _each(arrivals: Iterable[tuple[float, int]], items: Iterable[Item]) -> Iterator[Arrived]:
    """Pair each item with its arrival time."""
    times = (at for at, together in arrivals for _ in range(together))
    return zip(times, items, strict=False)


def _size(op: Op) -> int:
    try:
        if op.__class__ is Put:
            return ITEM_BYTES + len(op.key) + len(op.value)
        return ITEM_BYTES + size_of(op)
    except (TypeError, AttributeError):
        return ITEM_BYTES  # malformed: refused when it is evaluated
