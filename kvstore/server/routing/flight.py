"""The operations in transit to one other server over one link. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat, takewhile

from kvstore.partition.state.commands import Put
from kvstore.partition.state.traits import KEYLESS, UNORDERED
from kvstore.server.routing.large_reads import LargeReads
from kvstore.server.routing.pending import Pending, keys_of, written_bytes
from kvstore.types import PartitionId, ServerId

BYTES_IN_FLIGHT_MAX = 64 << 20


class Flight:
    """The operations in transit on one link, from its opening to its loss."""

    def __init__(self, server: ServerId, operations_max: int) -> None:
        self.server, self._operations_max = server, operations_max
        self.is_closed_for_more = False
        """True if the other side is stopping or does not read. Pending operations are still answered, but no more
        operations are sent."""
        self.pending: dict[int, tuple[PartitionId, Pending]] = {}
        """Operations by number. Numbers increase in the order of sending."""
        self.bytes = 0
        self.last_number = 0
        self.reads = LargeReads()
        """Reads that wait for their client's turn before they are sent."""
        self._numbers_on: dict[bytes, list[int]] = {}
        self._scanned_up_to = 0

    def has_capacity(self, count: int = 1) -> bool:
        return (
            not self.is_closed_for_more
            and len(self.pending) + self.reads.count + count <= self._operations_max
            and self.bytes < BYTES_IN_FLIGHT_MAX
        )

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def begin(self, partition: PartitionId, pending: Pending) -> int:
        """Add an operation and return its number, or return 0 if there is no capacity."""
        if not self.has_capacity():
            return 0
        number = self.next_number()
        self.pending[number] = (partition, pending)
        op = pending.op
        pending.size = len(op.value) if op.__class__ is Put else written_bytes(op)
        self.bytes += pending.size
        return number

    def begin_all(self, partition: PartitionId, pending: list[Pending]) -> range:
        """Add operations whose sizes are set, and return their numbers."""
        first = self.last_number + 1
        self.last_number += len(pending)
        numbers = range(first, self.last_number + 1)
        self.pending.update(zip(numbers, zip(repeat(partition), pending), strict=False))
        self.bytes += sum([each.size for each in pending])
        return numbers

    def end(self, number: int) -> tuple[PartitionId, Pending] | None:
        """Remove and return an operation that was answered or refused. Return None if it is no longer pending."""
        found = self.pending.pop(number, None)
        if found is not None:
            self.bytes -= found[1].size
        if self.reads.is_on:
            self.reads.over(number)
        return found

    def end_up_to(self, last: int) -> list[Pending]:
        """Remove and return the operations up to the number `last`, which have timed out."""
        overdue = list(takewhile(lambda number: number <= last, self.pending))
        return [found[1] for number in overdue if (found := self.end(number)) is not None]

    def end_all(self) -> dict[int, tuple[PartitionId, Pending]]:
        """Remove and return all operations by number, because the link was lost."""
        pending, self.pending = self.pending, {}
        self.bytes = 0
        self.is_closed_for_more = True
        return pending

    def carries(self, partition: PartitionId) -> bool:
        """Return True if an operation on the partition is in transit or waits for its turn."""
        return any(each == partition for each, _ in self.pending.values()) or self.reads.has(partition)

    def misdirected(self, partition_of: Callable[[bytes], PartitionId]) -> Iterator[int]:
        """Yield the numbers of operations that are in transit to a partition that does not own all of their keys."""
        for number, (partition, pending) in self.pending.items():
            op = pending.op
            if op.code not in KEYLESS and any(partition_of(key) != partition for key in keys_of(op)):
                yield number

    def writes_on(self, keys: set[bytes]) -> list[int]:
        """Return the numbers of writes in transit on these keys, because they may be refused too. The writes on a
        key are returned only once: no further write on the key is sent until all of them are refused or answered.
        The cost is linear, because each operation is examined once, and only after a refusal."""
        for number in reversed(self.pending):
            if number <= self._scanned_up_to:
                break
            op = self.pending[number][1].op
            if op.code not in UNORDERED:
                for key in keys_of(op):
                    self._numbers_on.setdefault(key, []).append(number)
        self._scanned_up_to = next(reversed(self.pending), self._scanned_up_to)
        return sorted({each for key in keys for each in self._numbers_on.pop(key, ()) if each in self.pending})

    def forget_keys(self) -> None:
        """Drop the index of writes by key. Pending operations are examined again after the next refusal."""
        self._numbers_on.clear()
        self._scanned_up_to = 0

    def check(self) -> None:
        assert all(pending.size == written_bytes(pending.op) for _, pending in self.pending.values())
        assert self.bytes == sum(pending.size for _, pending in self.pending.values())
        assert list(self.pending) == sorted(self.pending)
        self.reads.check()
