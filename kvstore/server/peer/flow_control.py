"""How many of another server's operations are under way at once, by what their answers may take. Decides only.

How large a value is shows when it has been read. So only so many operations of a partition that may bring values are
begun, fewer while values are large, and what comes behind them waits; other partitions' do not. While the other server
does not take its answers nothing is begun.

One link has the operations of all clients of that server. Four kinds of operations wait apart, so that a client which
asks for many large values and reads them slowly keeps few of the others waiting: writes, and counts; reads of one key,
also those that bring no value; reads of keys whose values were large when they were read last; and scans. Writes keep
their order among each other, which is what clients are promised (docs/protocol.md M15), and reads of one key theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvstore.partition.state.commands import Code, Flag, Op
from kvstore.partition.state.traits import POINT_READS
from kvstore.server.routing.large_reads import LARGE_BYTES
from kvstore.types import PartitionId

VALUES_MAX, VALUES_LARGE_MAX = 128, 4
"""Values of one partition and kind that may be on their way to one server; the second while they are large: small ones
wait behind what is on the link."""
READS_FIRST = 16
"""The same of reads of one key that find none of them under way, until these have shown how large their values are.
They are read in one turn, for which everybody waits: 128 of 1 MB took two seconds."""
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


class _Queue:
    """The operations of one kind on one partition."""

    __slots__ = ("siblings", "values", "values_first", "values_max", "waiting")

    def __init__(self, queues: _PartitionQueues, values_first: int) -> None:
        self.siblings = queues
        """All queues of its partition."""
        self.waiting: deque[Waiting] = deque()
        self.values = 0
        """Values that operations of this queue which are under way may bring."""
        self.values_first = self.values_max = values_first


class _PartitionQueues:
    """The operations on one partition: a queue for each kind."""

    __slots__ = ("all", "apart", "large", "large_keys", "reads", "scans", "writes")

    def __init__(self) -> None:
        self.writes, self.scans = _Queue(self, VALUES_MAX), _Queue(self, VALUES_MAX)
        self.reads, self.large = _Queue(self, READS_FIRST), _Queue(self, VALUES_LARGE_MAX)
        self.all = (self.writes, self.reads, self.large, self.scans)
        self.large_keys: dict[bytes, None] = {}
        """Keys whose values were large when they were read last, in the order of these reads."""
        self.apart: dict[bytes, int] = {}
        """Keys of reads that wait among `large`, with the number of these reads. A later read of such a key waits there
        too, however small its value has become: reads of one key keep their order."""

    def is_for_large(self, key: bytes) -> bool:
        """Whether a read of the key waits among `large`."""
        return key in self.large_keys or key in self.apart

    def add_large(self, read: Waiting) -> None:
        """Let the read wait among `large`, behind all reads there: they came before it."""
        key = read[1][1]
        self.apart[key] = self.apart.get(key, 0) + 1
        self.large.waiting.append(read)

    def no_more_apart(self, key: bytes) -> None:
        """A read of the key leaves `large`."""
        self.apart[key] -= 1
        if not self.apart[key]:
            del self.apart[key]

    def note_size(self, key: bytes, *, is_large: bool) -> None:
        """Remember whether the key's value, which has just been read, is large."""
        self.large_keys.pop(key, None)
        if is_large:
            self.large_keys[key] = None
            if len(self.large_keys) > LARGE_KEYS_MAX:
                del self.large_keys[next(iter(self.large_keys))]


class FlowControl:
    """Decides which operations of one connection wait, and in which order they begin."""

    def __init__(self) -> None:
        self.is_held = False
        """The other server does not take its answers."""
        self.waiting = 0
        self.abandoned = -1
        """Up to this number nobody wants the operations that wait any more (abandoned.py)."""
        self._by_partition: dict[PartitionId, _PartitionQueues] = {}
        self.under_way: dict[int, tuple[_Queue, int, bytes]] = {}
        """By number, operations that bring values: their queue, how many values they may bring, the key of a GET."""

    def arrive(self, partition: PartitionId, operations: Iterable[Waiting]) -> None:
        queues = self._by_partition.get(partition)
        if queues is None:
            queues = self._by_partition[partition] = _PartitionQueues()
        writes, reads, scans = queues.writes.waiting, queues.reads.waiting, queues.scans.waiting
        known, before = queues.large_keys, len(writes) + len(reads) + len(scans) + len(queues.large.waiting)
        for each in operations:
            op = each[1]
            if op[0] in POINT_READS:
                if not reads and (known or queues.apart) and queues.is_for_large(op[1]):
                    queues.add_large(each)
                else:
                    reads.append(each)  # `take` looks again: those before it may be reads of the same key
            else:
                (scans if op[0] in _SCANS else writes).append(each)
        self.waiting += len(writes) + len(reads) + len(scans) + len(queues.large.waiting) - before

    def take(self) -> Iterator[Waiting]:
        """Take the operations that may begin now; each partition's of one kind in the order in which they came. Taken
        are those that are asked for."""
        if not self.waiting or self.is_held:
            return
        for queues in self._by_partition.values():
            for queue in queues.all:
                waiting, are_reads = queue.waiting, queue is queues.reads
                while waiting and not self.is_held:
                    _, op, number, _, _ = waiting[0]
                    code = op[0]
                    if are_reads and (queues.large_keys or queues.apart) and queues.is_for_large(op[1]):
                        queues.add_large(waiting.popleft())  # once for each: to look through all for a key takes longer
                        continue
                    values = 1 if code == _GET else values_of(op) if code != _PUT or op[4] & _RETURN_OLD else 0
                    if values and number > self.abandoned:
                        if queue.values and queue.values + values > queue.values_max:
                            break
                        queue.values += values
                        self.under_way[number] = (queue, values, op[1] if code == _GET else b"")
                    if queue is queues.large:
                        queues.no_more_apart(op[1])
                    self.waiting -= 1
                    yield waiting.popleft()

    def newest(self) -> int:
        """The number of what has come last of all that waits; 0 if nothing does."""
        return max((waiting[-1][2] for waiting in self._all_waiting()), default=0)

    def oldest(self, heard: int) -> int:
        """How many frames of results the sender had taken in when it sent what waits here longest, or `heard`."""
        return min((waiting[0][4] for waiting in self._all_waiting()), default=heard)

    def _all_waiting(self) -> Iterator[deque[Waiting]]:
        return (queue.waiting for queues in self._by_partition.values() for queue in queues.all if queue.waiting)

    def end(self, number: int, size: int) -> None:
        """End an operation that is answered with a value of `size` bytes, or without one."""
        found = self.under_way.pop(number, None)
        if found is None:
            return
        queue, values, key = found
        queue.values -= values
        if size > LARGE_BYTES:
            queue.values_max = VALUES_LARGE_MAX
            if key:
                queue.siblings.note_size(key, is_large=True)
            return
        if key and queue is queue.siblings.large:
            queue.siblings.note_size(key, is_large=False)
        if not queue.values:
            more = min(2 * queue.values_max, VALUES_MAX)
            queue.values_max = more if queue.waiting else min(more, queue.values_first)

    def clear(self) -> None:
        """The connection is lost: nothing more is begun."""
        self._by_partition.clear()
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
