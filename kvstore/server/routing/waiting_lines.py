"""Holds operations until the leader of their partition can be reached: one line per partition, in order of arrival.
Decides only."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from kvstore.server.routing.pending import Pending, written_bytes
from kvstore.types import PartitionId


def by_order(pending: Pending) -> int:
    return pending.order


class WaitingLines:
    """The lines of all partitions, with a common limit on the number and bytes of operations."""

    def __init__(self, *, operations_max: int, bytes_max: int) -> None:
        self._operations_max, self._bytes_max = operations_max, bytes_max
        self.lines: dict[PartitionId, list[Pending]] = {}
        """The waiting operations by partition. Contains no empty lines."""
        self.count = 0
        self.bytes = 0

    def __contains__(self, partition: PartitionId) -> bool:
        return partition in self.lines

    def add(self, partition: PartitionId, pending: Pending) -> bool:
        """Add an operation. Return False if a limit is reached."""
        if self.count >= self._operations_max or self.bytes >= self._bytes_max:
            return False
        self.put_back(partition, pending)
        return True

    def put_back(self, partition: PartitionId, pending: Pending) -> None:
        """Add an operation that waited before. The limits do not apply: the last operation that they admitted may have
        exceeded them."""
        self.count += 1
        self.bytes += written_bytes(pending.op)
        insort(self.lines.setdefault(partition, []), pending, key=by_order)

    def drain(self, partition: PartitionId, takes: Callable[[Pending], bool]) -> None:
        """Pass the line's operations to `takes` in order and remove those for which it returns True, until it
        returns False. Operations that are added meanwhile go behind the remaining ones."""
        line = self.lines.pop(partition)
        taken = 0
        while taken < len(line) and takes(line[taken]):
            self._forget(line[taken])
            taken += 1
        left = line[taken:] + self.lines.pop(partition, [])
        if left:
            self.lines[partition] = left

    def take_all(self) -> Iterator[tuple[PartitionId, Pending]]:
        """Remove and yield all operations, line by line."""
        lines, self.lines = self.lines, {}
        self.count = self.bytes = 0
        for partition in sorted(lines):
            for pending in lines[partition]:
                yield partition, pending

    def _forget(self, pending: Pending) -> None:
        self.count -= 1
        self.bytes -= written_bytes(pending.op)

    def check(self) -> None:
        everything = [pending for line in self.lines.values() for pending in line]
        assert self.count == len(everything)
        assert self.bytes == sum(written_bytes(pending.op) for pending in everything)
        for line in self.lines.values():
            assert line, "an empty line would block new operations of its partition"
            assert line == sorted(line, key=by_order)
