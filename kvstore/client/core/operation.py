"""One call of a client in progress, and the request ids that distinguish its attempts from other calls. Decides only.

Request ids are numbered per partition, each numbering under its own client id. A request keeps the numbering that
it began with even if its key moves. So a partition that is down never keeps other partitions from forgetting old
requests.
"""

from __future__ import annotations

from math import inf
from typing import Any

from msgspec import Struct

from kvstore.limits import CLIENT_BYTES
from kvstore.proto import kv_pb2

IN_FLIGHT_MAX = 1_024
"""Maximum number of operations of one partition in flight. Also bounds the span of open request sequences."""
IN_FLIGHT_BYTES_MAX = 32 << 20
OVERDUE_S = 10.0
"""Time after its deadline at which an operation in flight frees its slot."""
SEEN_STEP_MS = 1_000
"""Step by which the leader time in requests advances, so that requests share a lane. An older time is safe."""
MISTAKEN_MS = 60_000
"""Largest difference between the times of healthy servers is a few seconds. A server time that was this much higher was
wrong."""

GET, META, PUT, DELETE, CHECK = kv_pb2.GET, kv_pb2.META, kv_pb2.PUT, kv_pb2.DELETE, kv_pb2.CHECK
OPERATION_BYTES = 32
"""Bytes that an operation counts besides its key and value."""
READS = frozenset({GET, META, kv_pb2.SCAN, kv_pb2.RANGE, kv_pb2.SCAN_TOKENS, kv_pb2.COUNT})


class ClientOperation(Struct, eq=False):
    """One call of the client in progress: the request, its identity, and its waiter."""

    code: int
    key: bytes
    size: int
    """Bytes of key and value, and a fixed cost."""
    is_read: bool
    value: bytes = b""
    options: kv_pb2.Options | None = None
    level: int = 0
    partition: str = ""
    """Partition that carries it out: set by the caller for a scan or count, otherwise found by the key."""
    numbering: Any = None
    """The Numbering under which it began."""
    sequence: int = 0
    """Sequence of its request id; 0 for a read, which has none."""
    seen_ms: int = 0
    """Leader time that it carries."""
    renumbered: int = 0
    """How often it has received another id."""
    retries: int = 0
    """How often it was sent again."""
    is_sent: bool = False
    """True if the current attempt has been sent."""
    is_unknown: bool = False
    """True if an earlier attempt may have been carried out."""
    deadline: float = 0.0
    """Deadline of all attempts together, by the boot-time clock."""
    waiter: Any = None
    """Future or CallWaiter of the caller, depending on the client."""


def operation(
    code: int, key: bytes, value: bytes = b"", options: kv_pb2.Options | None = None, level: int = 0
) -> ClientOperation:
    """Return an operation of any code."""
    return ClientOperation(code, key, len(key) + len(value) + OPERATION_BYTES, code in READS, value, options, level)


class Numbering:
    """The request ids of one client at one partition, and its operations in flight there."""

    __slots__ = ("_checked_at", "_floor", "_in_flight", "_next", "_open", "_size", "client", "seen_ms")

    def __init__(self, client: bytes) -> None:
        if len(client) != CLIENT_BYTES:
            raise ValueError(f"expected a client id of {CLIENT_BYTES} bytes, got {len(client)}")
        self.client = client
        self.seen_ms = 0
        """Leader time that new requests carry."""
        self._next = 1
        self._floor = 1
        """A lower bound of `first_unacknowledged`, which costs a search."""
        self._open: dict[int, None] = {}
        """Sequences in flight, in order."""
        self._in_flight: dict[ClientOperation, None] = {}
        self._size = 0
        """Bytes of all operations in flight."""
        self._checked_at = -inf

    @property
    def first_unacknowledged(self) -> int:
        """Lowest sequence for which the caller still waits."""
        return next(iter(self._open), self._next)

    def has_capacity(self) -> bool:
        """Return True if another operation may begin."""
        if self._next - self._floor >= IN_FLIGHT_MAX:
            self._floor = self.first_unacknowledged
        return (
            self._next - self._floor < IN_FLIGHT_MAX
            and len(self._in_flight) < IN_FLIGHT_MAX
            and self._size < IN_FLIGHT_BYTES_MAX
        )

    def begin(self, operation: ClientOperation) -> bool:
        """Begin an operation; a mutation gets its sequence. Returns False if there is no free slot."""
        sequence = self._next
        is_near = sequence - self._floor >= IN_FLIGHT_MAX or len(self._in_flight) >= IN_FLIGHT_MAX
        if (is_near or self._size >= IN_FLIGHT_BYTES_MAX) and not self.has_capacity():
            return False
        self._in_flight[operation] = None
        self._size += operation.size
        operation.numbering, operation.seen_ms = self, self.seen_ms
        if not operation.is_read:
            operation.sequence = sequence
            self._open[sequence] = None
            self._next = sequence + 1
        return True

    def end(self, operation: ClientOperation) -> None:
        """End an operation that has no waiter any more. Idempotent."""
        if operation not in self._in_flight:
            return
        del self._in_flight[operation]
        self._size -= operation.size
        if operation.sequence:
            self._open.pop(operation.sequence, None)

    def end_overdue(self, now: float) -> bool:
        """End the operations that are past their deadline by OVERDUE_S, and return True if there were any. The thread
        that runs such an operation hangs, and no attempt follows. Checks at most once in OVERDUE_S."""
        if now < self._checked_at + OVERDUE_S:
            return False
        self._checked_at = now
        overdue = [each for each in self._in_flight if each.deadline + OVERDUE_S < now]
        for operation in overdue:
            self.end(operation)
        return bool(overdue)

    def renumber(self, operation: ClientOperation) -> None:
        """Give a mutation that was definitely not carried out another id, with a newer time. Does nothing if the
        mutation has ended as overdue: nobody would end the new id, and later requests would wait for it."""
        if operation not in self._in_flight:
            return
        self._open.pop(operation.sequence, None)
        operation.renumbered += 1
        operation.sequence, operation.seen_ms = self._next, self.seen_ms
        self._open[self._next] = None
        self._next += 1

    def see(self, time_ms: int) -> None:
        """Record the partition's time as a server has reported it. A time in the future that a server once reported is
        dropped, because leaders refuse requests that carry it."""
        if time_ms >= self.seen_ms + SEEN_STEP_MS or 0 < time_ms < self.seen_ms - MISTAKEN_MS:
            self.seen_ms = time_ms
