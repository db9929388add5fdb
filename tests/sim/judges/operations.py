"""The recorded history of a run: the operations of simulated clients with their times and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.state.commands import Code, Level, Op, RequestId
from kvstore.types import PartitionId

WRITES = frozenset(
    {Code.PUT, Code.DELETE, Code.INCREMENT, Code.APPEND, Code.EXPIRE, Code.BATCH, Code.DELETE_RANGE, Code.CHECK}
)
_LEVEL_AT = {Code.GET: 2, Code.META: 2, Code.SCAN: 5, Code.RANGE: 5, Code.SCAN_TOKENS: 3, Code.COUNT: 2}
_SEQ_AT = {Code.GET: 3, Code.META: 3, Code.SCAN: 6, Code.RANGE: 6}


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
    """A result as documented in kvstore.partition.state.commands, or the StoreError."""
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
        return Code(self.op[0])

    @property
    def key(self) -> bytes:
        """The key, or the start of a range."""
        key: bytes = self.op[1] if self.code is not Code.SCAN_TOKENS else b""
        return key

    @property
    def is_write(self) -> bool:
        return self.code in WRITES

    @property
    def level(self) -> Level | None:
        """The consistency level of a read."""
        place = _LEVEL_AT.get(self.code)
        return None if place is None else Level(self.op[place])

    @property
    def token(self) -> int:
        """The sequence that a read requires to be applied."""
        place = _SEQ_AT.get(self.code)
        return 0 if place is None else int(self.op[place])

    def __str__(self) -> str:
        ended = "open" if self.ended == inf else f"{self.ended:.6f}"
        asked = " ".join(map(str, self.op[1:]))
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
        is_list = operation.code is Code.BATCH and isinstance(result, list)
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


def _told(result: Any) -> Any:
    """Return a result with lists replaced by tuples: peer links deliver lists."""
    return tuple(map(_told, result)) if isinstance(result, list) else result
