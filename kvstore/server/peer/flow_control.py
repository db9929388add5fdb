"""How many of another server's operations are under way at once, by what their answers may take. Decides only.

How large a value is shows when it has been read. So only so many operations of a partition that may bring values are
begun, fewer while values are large, and what comes behind them waits; other partitions' do not. While the other server
does not take its answers nothing is begun.

One link has the operations of all clients of that server. So that who asks for much and takes little keeps few of the
others waiting, three kinds of operations wait apart: writes, and counts; reads of one key, also those that bring no
value; and scans, and reads of keys whose values were large when they were read last. Writes keep their order among each
other, which is what clients are promised (docs/protocol.md M15), and reads of one key theirs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from operator import itemgetter

from kvstore.partition.state.commands import Code, Flag, Op
from kvstore.partition.state.traits import POINT_READS
from kvstore.types import PartitionId

VALUES_MAX, VALUES_LARGE_MAX = 128, 16
"""Values of one partition and kind that may be on their way to one server; the second while they are large."""
LARGE_BYTES = 64 << 10
LARGE_KEYS_MAX = 2_048
"""Keys of one partition of which is remembered that their values are large."""
OPERATION_TIMEOUT_S = 5.0
"""How long a server waits for an operation that another one leads."""
_BATCH_VALUES_MAX = 16
"""A batch has no larger results than so many of the largest values."""

Waiting = tuple[PartitionId, Op, int, int, int]
"""Partition, operation, its number, version of the ring, and how many frames of results its sender had heard."""

_GET, _PUT = int(Code.GET), int(Code.PUT)
_RETURN_OLD = int(Flag.RETURN_OLD)
_SCANS = frozenset((int(Code.SCAN), int(Code.RANGE), int(Code.SCAN_TOKENS)))
"""They bring as much as they may, and keep no order."""
_number_of = itemgetter(2)


class _Queue:
    """The operations of one kind, of one partition."""

    __slots__ = ("line", "values", "values_max", "waiting")

    def __init__(self, line: _Line) -> None:
        self.line = line
        self.waiting: deque[Waiting] = deque()
        self.values = 0
        self.values_max = VALUES_MAX


class _Line:
    """The operations of one partition."""

    __slots__ = ("large", "large_keys", "queues", "reads", "waits", "writes")

    def __init__(self) -> None:
        self.writes, self.reads, self.large = _Queue(self), _Queue(self), _Queue(self)
        self.queues = (self.writes, self.reads, self.large)
        self.large_keys: dict[bytes, int] = {}
        """Those whose values were large when they were read last, with how many reads of them wait. While one waits its
        key stays here, so that reads of one key keep their order."""
        self.waits: Counter[bytes] | None = None
        """How many wait among `reads`, by their keys: from when the first large value is found until none waits. To
        look through all of them for each large value would take longer than to read it."""

    def note_size(self, key: bytes, *, is_large: bool) -> None:
        """A value has been read."""
        known = self.large_keys
        waiting = known.pop(key, None)
        if not is_large and not waiting:
            return
        known[key] = self._move(key) if waiting is None else waiting
        if len(known) > LARGE_KEYS_MAX:
            forgotten = next((each for each, waiting in known.items() if not waiting), None)
            if forgotten is not None:
                del known[forgotten]

    def no_more_waits(self, key: bytes) -> None:
        """A read of it leaves the others."""
        assert self.waits is not None
        self.waits[key] -= 1
        if not self.waits[key]:
            del self.waits[key]
        if not self.waits:
            self.waits = None

    def _move(self, key: bytes) -> int:
        """Let the reads of a key that was found to be large wait with others of its kind; returns how many."""
        reads, large = self.reads.waiting, self.large.waiting
        if self.waits is None:
            self.waits = Counter(each[1][1] for each in reads)
        count = self.waits.pop(key, 0)
        if count:
            moved = [each for each in reads if each[1][1] == key]
            rest = [each for each in reads if each[1][1] != key]
            reads.clear()
            reads.extend(rest)
            both = sorted((*large, *moved), key=_number_of)
            large.clear()
            large.extend(both)
            self.large.values_max = VALUES_LARGE_MAX
        return count


class Pace:
    """One connection's."""

    def __init__(self) -> None:
        self.is_held = False
        """The other server does not take its answers."""
        self.waiting = 0
        self.abandoned = -1
        """What waits up to this number is wanted by nobody any more (abandoned.py)."""
        self._lines: dict[PartitionId, _Line] = {}
        self.under_way: dict[int, tuple[_Queue, int, bytes]] = {}
        """By number, with the values that they may bring, and the key of a read of one. What brings none is not in
        here."""

    def arrive(self, partition: PartitionId, operations: Iterable[Waiting]) -> None:
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = _Line()
        writes, reads, large = line.writes.waiting, line.reads.waiting, line.large.waiting
        known, waits, before = line.large_keys, line.waits, len(writes) + len(reads) + len(large)
        for each in operations:
            op = each[1]
            if op[0] in POINT_READS:
                if known and op[1] in known:
                    known[op[1]] += 1
                    large.append(each)
                else:
                    reads.append(each)
                    if waits is not None:
                        waits[op[1]] += 1
            else:
                (large if op[0] in _SCANS else writes).append(each)
        self.waiting += len(writes) + len(reads) + len(large) - before

    def take(self) -> Iterator[Waiting]:
        """Take the operations that may begin now; each partition's of one kind in the order in which they came. Taken
        are those that are asked for."""
        if not self.waiting or self.is_held:
            return
        for line in self._lines.values():
            for queue in line.queues:
                waiting = queue.waiting
                while waiting and not self.is_held:
                    _, op, number, _, _ = waiting[0]
                    code = op[0]
                    values = 1 if code == _GET else values_of(op) if code != _PUT or op[4] & _RETURN_OLD else 0
                    if values and number > self.abandoned:
                        if queue.values and queue.values + values > queue.values_max:
                            break
                        queue.values += values
                        self.under_way[number] = (queue, values, op[1] if code == _GET else b"")
                    if queue is line.large and code in POINT_READS:
                        line.large_keys[op[1]] -= 1
                    elif queue is line.reads and line.waits is not None:
                        line.no_more_waits(op[1])
                    self.waiting -= 1
                    yield waiting.popleft()

    def newest(self) -> int:
        """The number of what has come last of all that waits; 0 if nothing does."""
        return max((waiting[-1][2] for waiting in self._all_waiting()), default=0)

    def oldest(self, heard: int) -> int:
        """How many frames of results the sender had taken in when it sent what waits here longest, or `heard`."""
        return min((waiting[0][4] for waiting in self._all_waiting()), default=heard)

    def _all_waiting(self) -> Iterator[deque[Waiting]]:
        return (queue.waiting for line in self._lines.values() for queue in line.queues if queue.waiting)

    def end(self, number: int, size: int) -> None:
        """It is answered with a value of `size` bytes, or without one."""
        found = self.under_way.pop(number, None)
        if found is None:
            return
        queue, values, key = found
        queue.values -= values
        if size > LARGE_BYTES:
            queue.values_max = VALUES_LARGE_MAX
            if key:
                queue.line.note_size(key, is_large=True)
            return
        if key and queue is queue.line.large:
            queue.line.note_size(key, is_large=False)
        if not queue.values:
            queue.values_max = min(2 * queue.values_max, VALUES_MAX)

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
