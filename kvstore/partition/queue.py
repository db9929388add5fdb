"""Operations that wait for their entry: bounded in number and bytes, in order, with the time of their arrival. Decides
only."""

from __future__ import annotations

from collections import deque

from kvstore.partition.commands import Code, Op
from kvstore.partition.config import PartitionConfig
from kvstore.partition.evaluate import Item
from kvstore.partition.operations import size_of

ITEM_BYTES = 64
"""Counted for each operation beside its key and value."""
ENTRY_ITEMS_MAX = 1000
"""Decided at once: a few milliseconds."""

_PUT = int(Code.PUT)


# docs/protocol.md P10
class Queue:
    """First come, first served."""

    def __init__(self, config: PartitionConfig) -> None:
        self.bytes = 0
        self._config = config
        self._items: deque[tuple[Item, int]] = deque()
        """With its size."""
        self._arrivals: deque[tuple[float, int]] = deque()
        """Time and number of those that came together, in order."""
        self._unstamped = 0

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Item) -> bool:
        """Take the operation in; False if a bound is reached."""
        size = _size(item[0])
        config = self._config
        if len(self._items) >= config.queue_items_max or self.bytes + size > config.queue_bytes_max:
            return False
        self._items.append((item, size))
        self.bytes += size
        self._unstamped += 1
        return True

    def put_back(self, item: Item, now: float) -> None:
        """Put an operation before all others."""
        size = _size(item[0])
        self._items.appendleft((item, size))
        self._arrivals.appendleft((now, 1))
        self.bytes += size

    def put_all_back(self, items: list[Item], now: float) -> None:
        """Put operations before all others, in this order."""
        for item in reversed(items):
            self.put_back(item, now)

    def stamp(self, now: float) -> None:
        """What was offered since the last call arrived at `now`."""
        if self._unstamped:
            self._arrivals.append((now, self._unstamped))
            self._unstamped = 0

    def take(self) -> list[Item]:
        """The operations of the next entry."""
        if self.bytes <= self._config.entry_bytes_max and len(self._items) <= ENTRY_ITEMS_MAX:
            return self.take_all()
        items: list[Item] = []
        size = 0
        while self._items and size < self._config.entry_bytes_max and len(items) < ENTRY_ITEMS_MAX:
            item, item_size = self._items.popleft()
            items.append(item)
            size += item_size
        self.bytes -= size
        self._forget_arrivals(len(items))
        return items

    def take_all(self) -> list[Item]:
        """Everything."""
        items = [item for item, _ in self._items]
        self._items.clear()
        self._arrivals.clear()
        self.bytes = self._unstamped = 0
        return items

    def take_older(self, before: float) -> list[Item]:
        """What arrived before `before`."""
        items: list[Item] = []
        while self._arrivals and self._arrivals[0][0] < before:
            for _ in range(self._arrivals.popleft()[1]):
                item, size = self._items.popleft()
                items.append(item)
                self.bytes -= size
        return items

    def _forget_arrivals(self, count: int) -> None:
        while count and self._arrivals:
            at, together = self._arrivals.popleft()
            if together > count:
                self._arrivals.appendleft((at, together - count))
                return
            count -= together
        self._unstamped -= count


class Shelf:
    """Operations that wait for a range of tokens, in order. Bounded as a queue is."""

    def __init__(self, config: PartitionConfig) -> None:
        self.bytes = 0
        self._config = config
        self._items: deque[tuple[float, Item, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Item, now: float) -> bool:
        """Put the operation aside; False if a bound is reached."""
        size = _size(item[0])
        config = self._config
        if len(self._items) >= config.queue_items_max or self.bytes + size > config.queue_bytes_max:
            return False
        self._items.append((now, item, size))
        self.bytes += size
        return True

    def take_all(self) -> list[Item]:
        """Everything."""
        items = [item for _, item, _ in self._items]
        self._items.clear()
        self.bytes = 0
        return items

    def take_older(self, before: float) -> list[Item]:
        """What was put aside before `before`."""
        items: list[Item] = []
        while self._items and self._items[0][0] < before:
            _, item, size = self._items.popleft()
            items.append(item)
            self.bytes -= size
        return items


def _size(op: Op) -> int:
    try:
        return ITEM_BYTES + (len(op[1]) + len(op[2]) if op[0] == _PUT else size_of(op))
    except (TypeError, LookupError):
        return ITEM_BYTES  # malformed: refused when it is decided on
