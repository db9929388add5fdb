"""Limits the memory for data that batches read, and that single writes read if they return the previous record, over
gRPC. Decides only.

The leader holds the results until its entry is on disk, and the endpoint holds them until they are sent. Their size is
known only then, and a write cannot be repeated. Therefore the maximum size is reserved before such an operation begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import Overloaded, StoreError
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.partition.state.commands import Delete, Flag, Get, Op, Put, Result, Sink, WrappedSink
from kvstore.partition.state.operations import BATCH_RESULT_BYTES_MAX
from kvstore.server.routing.backend import Backend
from kvstore.types import PartitionId

BYTES_MAX = 512 << 20
_RETURN_OLD = int(Flag.RETURN_OLD)


class BatchBudget:
    """The budget of one server, shared by all callers."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max

    def sink(self, op: Op, sink: Sink) -> Sink:
        """Reserve bytes for a batch or a write, and return a sink that passes the result to `sink` and frees the
        bytes. Raises Overloaded if the budget is used up."""
        size = read_bytes(op)
        if not size:
            return sink
        if self.bytes + size > self._bytes_max and self.bytes:
            raise Overloaded("the writes in flight may return too much data in total; try again")
        self.bytes += size
        return _BudgetedSink(self, size, sink)


class BudgetedBackend:
    """A backend that applies the budget to operations that are submitted one by one."""

    def __init__(self, backend: Backend, budget: BatchBudget) -> None:
        self._backend, self._budget = backend, budget

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Submit the operations. Raises Overloaded."""
        for op, token in zip(ops, tokens, strict=True):
            self._backend.submit((op,), self._budget.sink(op, sink), (token,), ring_version, partition)


class _BudgetedSink(WrappedSink):
    """Frees the reserved bytes when the operation has ended, even if its caller no longer waits."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: BatchBudget, size: int, sink: Sink) -> None:
        super().__init__(sink)
        self._budget, self._size = budget, size

    def complete(self, token: int, result: Result | StoreError) -> None:
        self._budget.bytes -= self._size
        self._sink.complete(token, result)


def read_bytes(op: Op) -> int:
    """Return the maximum number of bytes that a batch or a write may read."""
    if op.ops:
        return min(sum(map(_reads, op.ops)) * VALUE_BYTES_MAX, BATCH_RESULT_BYTES_MAX)
    return _reads(op) * VALUE_BYTES_MAX


def _reads(op: Op) -> bool:
    match op:
        case Get():
            return True
        case Put():
            return bool(op.flags & _RETURN_OLD)
        case Delete():
            return bool(op.flags & _RETURN_OLD)
        case _:
            return False
