"""One call of a client on its way, and the request ids that tell its attempts from other calls. Decides only.

Request ids are numbered per partition, each numbering under a client id of its own. A request keeps the numbering it
began with, also when its key has moved, so one partition that stands still never holds back what others may forget.
"""

from __future__ import annotations

from math import inf
from typing import Any

from msgspec import Struct

from kvstore.limits import CLIENT_BYTES
from kvstore.proto import kv_pb2

IN_FLIGHT_MAX = 1_024
"""Operations of one partition that a client has under way; also the span of its open request sequences."""
IN_FLIGHT_BYTES_MAX = 32 << 20
OVERDUE_S = 10.0
"""An operation that is under way for so long after its deadline gives its place to another one."""
SEEN_STEP_MS = 1_000
"""The leader time that requests carry moves in steps, so that requests of one time share a lane. Too old is safe."""
MISTAKEN_MS = 60_000
"""Servers that are well tell times that are seconds apart; one that had told so much more was wrong."""

GET, META, PUT, DELETE, CHECK = kv_pb2.GET, kv_pb2.META, kv_pb2.PUT, kv_pb2.DELETE, kv_pb2.CHECK
OPERATION_BYTES = 32
"""Beside key and value."""
READS = frozenset({GET, META, kv_pb2.SCAN, kv_pb2.RANGE, kv_pb2.SCAN_TOKENS, kv_pb2.COUNT})


class ClientOperation(Struct, eq=False):
    """One call of the client on its way: what it asks, under which identity, and who waits for it."""

    code: int
    key: bytes
    size: int
    """Of key and value, and what they cost beside."""
    is_read: bool
    value: bytes = b""
    options: kv_pb2.Options | None = None
    level: int = 0
    partition: str = ""
    """Where it goes; named by the caller of a scan or count, else found by its key."""
    numbering: Any = None
    """The Numbering that it has begun with."""
    sequence: int = 0
    """Of its request id; 0: a read has none."""
    seen_ms: int = 0
    """The leader's time that it carries."""
    renumbered: int = 0
    """How often it got another id."""
    is_sent: bool = False
    """The present attempt has left the client."""
    is_unknown: bool = False
    """An earlier attempt may have been carried out."""
    deadline: float = 0.0
    """Of all attempts together, by the boot-time clock."""
    waiter: Any = None
    """Future or lock of the caller; the face that uses it knows which."""


def operation(
    code: int, key: bytes, value: bytes = b"", options: kv_pb2.Options | None = None, level: int = 0
) -> ClientOperation:
    """Any operation."""
    return ClientOperation(code, key, len(key) + len(value) + OPERATION_BYTES, code in READS, value, options, level)


class Numbering:
    """The request ids of one client at one partition, and what it has under way there."""

    __slots__ = ("_checked_at", "_floor", "_next", "_open", "_size", "_under_way", "client", "seen_ms")

    def __init__(self, client: bytes) -> None:
        if len(client) != CLIENT_BYTES:
            raise ValueError(f"want a client id of {CLIENT_BYTES} bytes, got {len(client)}")
        self.client = client
        self.seen_ms = 0
        """The leader time that new requests carry."""
        self._next = 1
        self._floor = 1
        """No more than `first_unacknowledged`, which costs a search."""
        self._open: dict[int, None] = {}
        """Sequences under way, in order."""
        self._under_way: dict[ClientOperation, None] = {}
        self._size = 0
        """Of all that is under way."""
        self._checked_at = -inf

    @property
    def first_unacknowledged(self) -> int:
        """The caller waits for nothing below."""
        return next(iter(self._open), self._next)

    def has_capacity(self) -> bool:
        """Whether another operation may begin."""
        if self._next - self._floor >= IN_FLIGHT_MAX:
            self._floor = self.first_unacknowledged
        return (
            self._next - self._floor < IN_FLIGHT_MAX
            and len(self._under_way) < IN_FLIGHT_MAX
            and self._size < IN_FLIGHT_BYTES_MAX
        )

    def begin(self, operation: ClientOperation) -> bool:
        """Take an operation in; a mutation gets its sequence. False if there is no room for it."""
        sequence = self._next
        is_near = sequence - self._floor >= IN_FLIGHT_MAX or len(self._under_way) >= IN_FLIGHT_MAX
        if (is_near or self._size >= IN_FLIGHT_BYTES_MAX) and not self.has_capacity():
            return False
        self._under_way[operation] = None
        self._size += operation.size
        operation.numbering, operation.seen_ms = self, self.seen_ms
        if not operation.is_read:
            operation.sequence = sequence
            self._open[sequence] = None
            self._next = sequence + 1
        return True

    def end(self, operation: ClientOperation) -> None:
        """Nobody waits for the operation any more. Idempotent."""
        if operation not in self._under_way:
            return
        del self._under_way[operation]
        self._size -= operation.size
        if operation.sequence:
            self._open.pop(operation.sequence, None)

    def end_overdue(self, now: float) -> bool:
        """End the operations that are past their deadline by OVERDUE_S, and return True if there are any. The thread
        that carries such an operation hangs, and no attempt follows. Looks for them once in OVERDUE_S."""
        if now < self._checked_at + OVERDUE_S:
            return False
        self._checked_at = now
        overdue = [each for each in self._under_way if each.deadline + OVERDUE_S < now]
        for operation in overdue:
            self.end(operation)
        return bool(overdue)

    def renumber(self, operation: ClientOperation) -> None:
        """Give a mutation that was definitely not done another id, with a younger time. Does nothing if the mutation
        has ended as overdue: nobody would end the new id, and later requests would wait for it."""
        if operation not in self._under_way:
            return
        self._open.pop(operation.sequence, None)
        operation.renumbered += 1
        operation.sequence, operation.seen_ms = self._next, self.seen_ms
        self._open[self._next] = None
        self._next += 1

    def see(self, time_ms: int) -> None:
        """A server has told the partition's time. A time of the future that a server once told is not kept: leaders
        refuse what carries it, for as long as it is ahead."""
        if time_ms >= self.seen_ms + SEEN_STEP_MS or 0 < time_ms < self.seen_ms - MISTAKEN_MS:
            self.seen_ms = time_ms
