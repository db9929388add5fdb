"""The recorded history of a run: the operations of simulated clients with their times and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from msgspec.structs import astuple

from kvstore.errors import StoreError
from kvstore.partition.state.commands import Code, Level, Op, RequestId, Transact
from kvstore.partition.state.traits import APPLIES_NOTHING
from kvstore.types import PartitionId

WRITES = frozenset(
    {
        *(Code.PUT, Code.DELETE, Code.INCREMENT, Code.APPEND, Code.EXPIRE, Code.BATCH, Code.DELETE_RANGE, Code.CHECK),
        Code.TRANSACT,
    }
)


class Status(StrEnum):
    OPEN = "open"
    OK = "ok"
    """Answered. A failed condition is an answer."""
    FAIL = "fail"
    """Refused: certainly not done."""
    INFO = "info"
    """Unknown outcome: never answered, the connection was lost, or the server reported an unknown outcome."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation from its first submission to its last answer, retries included."""

    number: int
    client: str
    """The client. It performs one operation at a time."""
    op: Op
    partition: PartitionId
    began: float
    """Virtual seconds."""
    ended: float = inf
    status: Status = Status.OPEN
    result: Any = None
    """A result as documented in kvstore.partition.state.commands, or the StoreError. For a transaction: the results of
    its operations, as for a batch."""
    positions: dict[PartitionId, int] = field(default_factory=dict)
    """The sequences at which a session sees a transaction, by partition."""
    request: RequestId | None = None
    attempts: list[str] = field(default_factory=list)
    """The node of each attempt."""
    errors: list[tuple[StoreError, float]] = field(default_factory=list)
    """Errors of attempts, with the time of each."""
    floor: int = 0
    """The lowest sequence that a stale or session read may show on the replica that answered it."""
    is_keyed: bool = True
    """True if the operation is sent to the owner of its key, not to a partition by name."""

    @property
    def code(self) -> Code:
        return Code(self.op.code)

    @property
    def key(self) -> bytes:
        """The key, or the start of a range."""
        return self.op.key

    @property
    def is_write(self) -> bool:
        return self.code in WRITES and not (isinstance(self.op, Transact) and changes_nothing(self.op))

    @property
    def level(self) -> Level | None:
        """The consistency level of a read."""
        if self.is_write:
            return None
        return Level.LINEARIZABLE if isinstance(self.op, Transact) else Level(self.op.level)

    @property
    def token(self) -> int:
        """The sequence that a read requires to be applied."""
        return 0 if isinstance(self.op, Transact) else self.op.seq

    def __str__(self) -> str:
        ended = "open" if self.ended == inf else f"{self.ended:.6f}"
        asked = " ".join(map(str, astuple(self.op)))
        via = ",".join(self.attempts)
        what = f"{self.began:.6f}..{ended} {self.client} via {via}: {self.code.name} {asked}"
        return f"{what} -> {self.status} {self.result!r}"


class Recorder:
    """The history in the order in which operations began."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def begin(
        self,
        client: str,
        op: Op,
        partition: PartitionId,
        now: float,
        request: RequestId | None,
        *,
        is_keyed: bool = True,
    ) -> Operation:
        """Record an operation that is about to be submitted."""
        operation = Operation(len(self.operations), client, op, partition, now, request=request, is_keyed=is_keyed)
        self.operations.append(operation)
        return operation

    def end(self, operation: Operation, status: Status, result: Any, now: float) -> None:
        """Record the outcome. An operation of unknown outcome never ends."""
        operation.status = status
        if operation.code is Code.TRANSACT and not isinstance(result, StoreError) and result is not None:
            result, positions = result
            operation.positions = {PartitionId(partition): seq for partition, seq in positions}
        is_list = operation.code in (Code.BATCH, Code.TRANSACT) and isinstance(result, list)
        operation.result = [_told(each) for each in result] if is_list else _told(result)
        operation.ended = inf if status is Status.INFO else now

    def succeeded(self, start: float, end: float, partition: PartitionId | None = None) -> int:
        """Return the number of operations that were answered between two moments."""
        return sum(
            operation.status is Status.OK
            and start <= operation.ended < end
            and partition in (None, operation.partition)
            for operation in self.operations
        )


def changes_nothing(op: Op) -> bool:
    """Return True if this is a batch or a transaction of reads and CHECKs only."""
    return bool(op.ops) and all(each.code in APPLIES_NOTHING for each in op.ops)


def transaction(ops: Sequence[Op], flags: int = 0) -> Transact:
    """Return a transaction. Its key is the first one that it writes, or the first one."""
    writes = [each for each in ops if each.code not in APPLIES_NOTHING]
    return Transact((writes or ops)[0].key, tuple(ops), flags)


def _told(result: Any) -> Any:
    """Return a result with lists replaced by tuples: peer links deliver lists."""
    return tuple(map(_told, result)) if isinstance(result, list) else result
