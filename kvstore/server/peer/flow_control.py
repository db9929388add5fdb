"""Limits how many operations of another server are in progress at once, by the possible size of their answers. Decides
only.

The size of a value is known only after it has been read. Therefore only a limited number of operations that may return
values are started per partition, fewer while values are large, and later ones wait; other partitions are not affected.
While the other server does not read its answers, nothing is started.

One link carries the operations of all clients of the other server. Four kinds of operations wait in separate queues, so
that a client that requests many large values and reads them slowly delays few others: writes and counts; reads of one
key; reads of keys whose values were large at their last read; and scans. Writes keep their order among each other,
which is what clients are promised (docs/protocol.md M15), and so do reads of one key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvstore.partition.state.commands import Batch, Delete, Flag, Get, Op, Put, Range, Scan, ScanTokens, Transact
from kvstore.partition.state.traits import POINT_READS
from kvstore.server.routing.large_reads import LARGE_BYTES
from kvstore.types import PartitionId

VALUES_MAX, VALUES_LARGE_MAX = 128, 4
"""Maximum number of values of one partition and kind in transit to one server; the second limit applies while values
are large. Small values wait behind what is on the link."""
READS_FIRST = 16
"""Initial limit for reads of one key, until some of them have shown the size of their values. They are read in one turn
of the event loop, which delays everything else: 128 values of 1 MB took two seconds."""
LARGE_KEYS_MAX = 2_048
"""Maximum number of keys per partition for which the server remembers that their values are large."""
OPERATION_TIMEOUT_S = 5.0
"""Seconds for which a server waits for an operation that another server leads."""
_BATCH_VALUES_MAX = 16
"""Size limit of a batch's results, in units of the largest value."""

Waiting = tuple[PartitionId, Op, int, int, int]
"""A waiting operation: its partition, the operation, its number, its ring version, and the number of result frames
that its sender had received."""

_RETURN_OLD = int(Flag.RETURN_OLD)
_SCANS = frozenset((Scan, Range, ScanTokens))
"""Operations whose results may be as large as allowed, and which need no order."""


class _Queue:
    """The waiting operations of one kind on one partition."""

    __slots__ = ("siblings", "values", "values_first", "values_max", "waiting")

    def __init__(self, queues: _PartitionQueues, values_first: int) -> None:
        self.siblings = queues
        """All queues of the same partition."""
        self.waiting: deque[Waiting] = deque()
        self.values = 0
        """Number of values that the operations in progress from this queue may return."""
        self.values_first = self.values_max = values_first


class _PartitionQueues:
    """The waiting operations on one partition, with one queue for each kind."""

    __slots__ = ("all", "apart", "large", "large_keys", "reads", "scans", "writes")

    def __init__(self) -> None:
        self.writes, self.scans = _Queue(self, VALUES_MAX), _Queue(self, VALUES_MAX)
        self.reads, self.large = _Queue(self, READS_FIRST), _Queue(self, VALUES_LARGE_MAX)
        self.all = (self.writes, self.reads, self.large, self.scans)
        self.large_keys: dict[bytes, None] = {}
        """Keys whose values were large at their last read, the least recently read first."""
        self.apart: dict[bytes, int] = {}
        """Keys of the reads that wait in `large`, with the number of these reads. Later reads of such a key also
        wait there, even if its value has become small, so that reads of one key keep their order."""

    def is_for_large(self, key: bytes) -> bool:
        """Return True if a read of the key must wait in `large`."""
        return key in self.large_keys or key in self.apart

    def add_large(self, read: Waiting) -> None:
        """Queue the read in `large`, behind all earlier reads there."""
        key = read[1].key
        self.apart[key] = self.apart.get(key, 0) + 1
        self.large.waiting.append(read)

    def no_more_apart(self, key: bytes) -> None:
        """Record that a read of the key has left `large`."""
        self.apart[key] -= 1
        if not self.apart[key]:
            del self.apart[key]

    def note_size(self, key: bytes, *, is_large: bool) -> None:
        """Remember whether the value of the key was large when it was just read."""
        self.large_keys.pop(key, None)
        if is_large:
            self.large_keys[key] = None
            if len(self.large_keys) > LARGE_KEYS_MAX:
                del self.large_keys[next(iter(self.large_keys))]


class FlowControl:
    """Decides which operations of one connection wait, and in which order they start."""

    def __init__(self) -> None:
        self.is_held = False
        """True while the other server does not read its answers."""
        self.waiting = 0
        self.abandoned = -1
        """Highest number among the waiting operations whose results nobody waits for (abandoned.py)."""
        self._by_partition: dict[PartitionId, _PartitionQueues] = {}
        self.in_flight: dict[int, tuple[_Queue, int, bytes]] = {}
        """Operations in progress that may return values. Maps the number of each to its queue, its number of values
        and, for a GET, its key."""

    def arrive(self, partition: PartitionId, operations: Iterable[Waiting]) -> None:
        queues = self._by_partition.get(partition)
        if queues is None:
            queues = self._by_partition[partition] = _PartitionQueues()
        writes, reads, scans = queues.writes.waiting, queues.reads.waiting, queues.scans.waiting
        known, before = queues.large_keys, len(writes) + len(reads) + len(scans) + len(queues.large.waiting)
        for each in operations:
            op = each[1]
            if op.code in POINT_READS:
                if not reads and (known or queues.apart) and queues.is_for_large(op.key):
                    queues.add_large(each)
                else:
                    reads.append(each)  # `take` checks again, because reads before it may be for the same key
            else:
                (scans if op.__class__ in _SCANS else writes).append(each)
        self.waiting += len(writes) + len(reads) + len(scans) + len(queues.large.waiting) - before

    def take(self) -> Iterator[Waiting]:
        """Yield the operations that may start now. Operations of one partition and kind are yielded in order of
        arrival. An operation counts as started when it is yielded."""
        if not self.waiting or self.is_held:
            return
        for queues in self._by_partition.values():
            for queue in queues.all:
                waiting, are_reads = queue.waiting, queue is queues.reads
                while waiting and not self.is_held:
                    _, op, number, _, _ = waiting[0]
                    if are_reads and (queues.large_keys or queues.apart) and queues.is_for_large(op.key):
                        queues.add_large(
                            waiting.popleft()
                        )  # moved once each, because searching all reads for a key takes longer
                        continue
                    is_get = op.__class__ is Get
                    values = 1 if is_get else values_of(op) if op.__class__ is not Put or op.flags & _RETURN_OLD else 0
                    if values and number > self.abandoned:
                        if queue.values and queue.values + values > queue.values_max:
                            break
                        queue.values += values
                        self.in_flight[number] = (queue, values, op.key if is_get else b"")
                    if queue is queues.large:
                        queues.no_more_apart(op.key)
                    self.waiting -= 1
                    yield waiting.popleft()

    def newest(self) -> int:
        """Return the number of the newest waiting operation, or 0 if none waits."""
        return max((waiting[-1][2] for waiting in self._all_waiting()), default=0)

    def oldest(self, received: int) -> int:
        """Return the number of result frames that the sender of the oldest waiting operation had received when it
        sent the operation; `received` if none waits."""
        return min((waiting[0][4] for waiting in self._all_waiting()), default=received)

    def _all_waiting(self) -> Iterator[deque[Waiting]]:
        return (queue.waiting for queues in self._by_partition.values() for queue in queues.all if queue.waiting)

    def end(self, number: int, size: int) -> None:
        """Record that an operation was answered with a value of `size` bytes, or with no value."""
        found = self.in_flight.pop(number, None)
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
        """Drop all operations, because the connection was lost."""
        self._by_partition.clear()
        self.waiting = 0


def values_of(op: Op) -> int:
    """Return the maximum size of an operation's result, in units of the largest value."""
    match op:
        case Get() | Scan() | Range():
            return 1
        case Put():
            return int(bool(op.flags & _RETURN_OLD))
        case Delete():
            return int(bool(op.flags & _RETURN_OLD))
        case Batch() | Transact():
            return min(sum(map(values_of, op.ops)), _BATCH_VALUES_MAX)
        case ScanTokens():
            return _BATCH_VALUES_MAX
    return 0
