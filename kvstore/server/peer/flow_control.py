"""How many of another server's operations are under way at once, by what their answers may take. Decides only.

How large a value is shows when it has been read. So only so many operations of a partition that may bring values are
begun, fewer while values are large, and what comes behind them waits; other partitions' do not. While the other server
does not take its answers nothing is begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvstore.partition.state.commands import Code, Flag, Op
from kvstore.types import PartitionId

VALUES_MAX, VALUES_LARGE_MAX = 128, 16
"""Values of one partition that may be on their way to one server; the second while they are large."""
LARGE_BYTES = 64 << 10
OPERATION_TIMEOUT_S = 5.0
"""How long a server waits for an operation that another one leads."""
_BATCH_VALUES_MAX = 16
"""A batch has no larger results than so many of the largest values."""

Waiting = tuple[PartitionId, Op, int, int, int]
"""Partition, operation, its number, version of the ring, and how many frames of results its sender had heard."""

_GET, _PUT = int(Code.GET), int(Code.PUT)
_RETURN_OLD = int(Flag.RETURN_OLD)


class _Line:
    """The operations of one partition."""

    __slots__ = ("values", "values_max", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Waiting] = deque()
        self.values = 0
        self.values_max = VALUES_MAX


class Pace:
    """One connection's."""

    def __init__(self) -> None:
        self.is_held = False
        """The other server does not take its answers."""
        self.waiting = 0
        self.abandoned = -1
        """What waits up to this number is wanted by nobody any more (abandoned.py)."""
        self._lines: dict[PartitionId, _Line] = {}
        self.under_way: dict[int, tuple[_Line, int]] = {}
        """By number, with the values that they may bring. What brings none is not in here."""

    def arrive(self, partition: PartitionId, operations: Iterable[Waiting]) -> None:
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = _Line()
        before = len(line.waiting)
        line.waiting.extend(operations)
        self.waiting += len(line.waiting) - before

    def take(self) -> Iterator[Waiting]:
        """Take the operations that may begin now; each partition's in the order in which they came. Taken are those
        that are asked for."""
        if not self.waiting or self.is_held:
            return
        for line in self._lines.values():
            waiting = line.waiting
            while waiting and not self.is_held:
                _, op, number, _, _ = waiting[0]
                code = op[0]
                values = 1 if code == _GET else values_of(op) if code != _PUT or op[4] & _RETURN_OLD else 0
                if values and number > self.abandoned:
                    if line.values and line.values + values > line.values_max:
                        break
                    line.values += values
                    self.under_way[number] = (line, values)
                self.waiting -= 1
                yield waiting.popleft()

    def newest(self) -> int:
        """The number of what has come last of all that waits; 0 if nothing does."""
        return max((line.waiting[-1][2] for line in self._lines.values() if line.waiting), default=0)

    def oldest(self, heard: int) -> int:
        """How many frames of results the sender had taken in when it sent what waits here longest, or `heard`."""
        return min((line.waiting[0][4] for line in self._lines.values() if line.waiting), default=heard)

    def end(self, number: int, size: int) -> None:
        """It is answered with a value of `size` bytes, or without one."""
        found = self.under_way.pop(number, None)
        if found is None:
            return
        line, values = found
        line.values -= values
        if size > LARGE_BYTES:
            line.values_max = VALUES_LARGE_MAX
        elif not line.values:
            line.values_max = min(2 * line.values_max, VALUES_MAX)

    def clear(self) -> None:
        """The connection is lost: nothing more is begun."""
        self._lines.clear()
        self.waiting = 0


def values_of(op: Op) -> int:
    """How many of the largest values the operation's answer may be as large as."""
    match op[0]:
        case Code.GET | Code.SCAN | Code.RANGE:
            return 1
        case Code.PUT:
            return int(bool(op[4] & _RETURN_OLD))
        case Code.DELETE:
            return int(bool(op[2] & _RETURN_OLD))
        case Code.BATCH:
            return min(sum(map(values_of, op[2])), _BATCH_VALUES_MAX)
        case Code.SCAN_TOKENS:
            return _BATCH_VALUES_MAX
    return 0
