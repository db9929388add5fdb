"""The operations under way to one other server, over one link. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat, takewhile

from kvstore.partition.state.commands import Code
from kvstore.partition.state.traits import KEYLESS, UNORDERED
from kvstore.server.routing.large_reads import LargeReads
from kvstore.server.routing.pending import Pending, keys_of, written_bytes
from kvstore.types import PartitionId, ServerId

_PUT = int(Code.PUT)

BYTES_IN_FLIGHT_MAX = 64 << 20


class Flight:
    """The operations that a link carries. It begins when the link has opened, and ends with it."""

    def __init__(self, server: ServerId, most: int) -> None:
        self.server, self._most = server, most
        self.is_closed_for_more = False
        """The other side stops, or does not read: what is under way is still answered, nothing more is sent."""
        self.pending: dict[int, tuple[PartitionId, Pending]] = {}
        """By their numbers, which rise in the order in which they were sent."""
        self.bytes = 0
        self.last_number = 0
        self.reads = LargeReads()
        """Reads that wait before they are under way."""
        self._numbers_on: dict[bytes, list[int]] = {}
        self._looked_up_to = 0

    def has_room(self, count: int = 1) -> bool:
        return (
            not self.is_closed_for_more
            and len(self.pending) + self.reads.count + count <= self._most
            and self.bytes < BYTES_IN_FLIGHT_MAX
        )

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def begin(self, partition: PartitionId, pending: Pending) -> int:
        """Take an operation in, if there is room; returns its number, else 0."""
        if not self.has_room():
            return 0
        number = self.next_number()
        self.pending[number] = (partition, pending)
        op = pending.op
        pending.size = len(op[2]) if op[0] == _PUT else written_bytes(op)
        self.bytes += pending.size
        return number

    def begin_all(self, partition: PartitionId, pending: list[Pending]) -> range:
        """Take operations in, whose sizes are given; returns their numbers."""
        first = self.last_number + 1
        self.last_number += len(pending)
        numbers = range(first, self.last_number + 1)
        self.pending.update(zip(numbers, zip(repeat(partition), pending), strict=False))
        self.bytes += sum([each.size for each in pending])
        return numbers

    def end(self, number: int) -> tuple[PartitionId, Pending] | None:
        """End an operation that is answered, or comes back; None if nobody waits for it any more."""
        found = self.pending.pop(number, None)
        if found is not None:
            self.bytes -= found[1].size
        if self.reads.is_on:
            self.reads.over(number)
        return found

    def end_up_to(self, last: int) -> list[Pending]:
        """End the operations up to this number, for which nobody waits any more, and return them."""
        overdue = list(takewhile(lambda number: number <= last, self.pending))
        return [found[1] for number in overdue if (found := self.end(number)) is not None]

    def end_all(self) -> dict[int, tuple[PartitionId, Pending]]:
        """End all operations, because the link is gone, and return them by their numbers."""
        pending, self.pending = self.pending, {}
        self.bytes = 0
        self.is_closed_for_more = True
        return pending

    def carries(self, partition: PartitionId) -> bool:
        """Whether an operation on the partition is under way, or waits for its turn."""
        return any(each == partition for each, _ in self.pending.values()) or self.reads.has(partition)

    def misdirected(self, partition_of: Callable[[bytes], PartitionId]) -> Iterator[int]:
        """Numbers of the operations that are under way to a partition which does not own all of their keys."""
        for number, (partition, pending) in self.pending.items():
            op = pending.op
            if op[0] not in KEYLESS and any(partition_of(key) != partition for key in keys_of(op)):
                yield number

    def writes_on(self, keys: set[bytes]) -> list[int]:
        """Return the numbers of the writes under way on these keys. Each key's are told once: more writes on it leave
        only when all of these have come back. Looks at each operation once, and not before something comes back."""
        for number in reversed(self.pending):
            if number <= self._looked_up_to:
                break
            op = self.pending[number][1].op
            if op[0] not in UNORDERED:
                for key in keys_of(op):
                    self._numbers_on.setdefault(key, []).append(number)
        self._looked_up_to = next(reversed(self.pending), self._looked_up_to)
        return sorted({each for key in keys for each in self._numbers_on.pop(key, ()) if each in self.pending})

    def forget_keys(self) -> None:
        """Forget the keys; operations under way are looked at again if something comes back."""
        self._numbers_on.clear()
        self._looked_up_to = 0

    def check(self) -> None:
        assert all(pending.size == written_bytes(pending.op) for _, pending in self.pending.values())
        assert self.bytes == sum(pending.size for _, pending in self.pending.values())
        assert list(self.pending) == sorted(self.pending)
        self.reads.check()
