"""The refusals that each operation may get. A refusal of the wrong kind is as wrong as a wrong answer: a client does
not retry after a permanent refusal, and treats a refused operation as not done.

This module checks that the cause of the refusal existed. witness.py checks that no refused operation is in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvstore.errors import (
    ConditionFailed,
    Conflict,
    InvalidRequest,
    Moved,
    NotCaughtUp,
    NotEnoughBookies,
    NotLeader,
    NotYetRaised,
    OutcomeUnknown,
    Overloaded,
    QuotaExceeded,
    RateExceeded,
    RequestExpired,
    StoreError,
    Unavailable,
)
from kvstore.limits import KEY_BYTES_MAX
from kvstore.namespaces import Namespace
from kvstore.partition.config import PartitionConfig
from kvstore.partition.state.commands import Batch, Code, Level, Op, Transact
from kvstore.partition.state.traits import IN_BATCH, version_of
from tests.sim.judges.effects import is_conditional
from tests.sim.judges.log_states import Wrong
from tests.sim.judges.operations import WRITES, Operation
from tests.sim.world.env import EPOCH_MS

BOUND_MS = 3_000
"""Maximum difference between the dates of servers that lead, in milliseconds (P28)."""
_GROWING = (Code.PUT, Code.APPEND, Code.INCREMENT, Code.EXPIRE)


class Refusals:
    """Judges the refusals of one run. `is_older`: some servers run the first release. `has_moves`: the ring changes.
    `may_lose_dates`: as in Knobs."""

    def __init__(
        self,
        config: PartitionConfig,
        spaces: tuple[Namespace, ...],
        *,
        is_older: bool,
        has_moves: bool = False,
        may_lose_dates: bool = False,
    ) -> None:
        self._config, self._spaces = config, spaces
        self._is_older, self._has_moves, self._may_lose_dates = is_older, has_moves, may_lose_dates
        self._causes: dict[type[StoreError], Callable[[Operation, Any, float], bool]] = {
            NotLeader: lambda *_: True,
            Unavailable: lambda *_: True,
            NotEnoughBookies: lambda operation, *_: operation.is_write,
            OutcomeUnknown: lambda operation, *_: operation.code in WRITES,
            Conflict: lambda operation, *_: isinstance(operation.op, Transact),
            Moved: lambda *_: self._has_moves,
            NotCaughtUp: lambda operation, *_: not operation.is_write and _names_a_sequence(operation),
            Overloaded: lambda operation, *_: operation.request is not None,
            RateExceeded: lambda operation, *_: self._is_in_namespace(operation, lambda space: space.ops_per_s > 0),
            QuotaExceeded: lambda operation, *_: self._may_exceed(operation),
            ConditionFailed: lambda operation, *_: is_conditional(operation.op),
            InvalidRequest: lambda operation, *_: (
                is_invalid(operation.op) or _may_be_no_number(operation.op) or self._may_be_ahead(operation)
            ),
            NotYetRaised: lambda operation, *_: (self._is_older or self._has_moves) and version_of(operation.op) > 1,
            RequestExpired: self._is_expired,
        }

    def check(self, operations: Iterable[Operation]) -> None:
        """Raises Wrong for a refusal without a cause and for an invalid operation that was done."""
        for operation in operations:
            for error, at in operation.errors:
                has_cause = self._causes.get(type(error))
                if has_cause is None:
                    raise Wrong(f"{type(error).__name__} reached a client: {error}: {operation}")
                if not has_cause(operation, error, at):
                    raise Wrong(f"{type(error).__name__} has no cause here: {error}: {operation}")
            if is_invalid(operation.op) and not isinstance(operation.result, StoreError):
                raise Wrong(f"an invalid operation was done: {operation}")

    # docs/protocol.md P15, P28
    def _is_expired(self, operation: Operation, error: Any, at: float) -> bool:
        """Return True if the request may be refused as too old. Its time is older than the window, or a bound on
        remembered results has dropped the client's earlier requests (P33). If all servers lose the date, the
        majority of wall clocks sets it (P28)."""
        if operation.request is None:
            return False
        if self._may_lose_dates:
            return True
        config = self._config
        if config.retry_results_max < _RESULTS or config.retry_bytes_max < _BYTES:
            return True
        age_ms = at * 1000 + EPOCH_MS - operation.request.seen_ms
        return not operation.request.seen_ms or age_ms > config.retry_window_ms - BOUND_MS

    # docs/protocol.md P28, P33
    def _may_be_ahead(self, operation: Operation) -> bool:
        """Return True if the request may carry a time too far in the future. A simulated user carries the latest time
        of all partitions to each of them, and their times differ if all servers lose the date. Clients of the library
        carry each partition's own time."""
        return self._may_lose_dates and operation.request is not None and operation.request.seen_ms > 0

    def _is_in_namespace(self, operation: Operation, has: Callable[[Namespace], bool]) -> bool:
        """Return True if a key of the operation is in a namespace of this kind. The start of a range counts as its
        key."""
        parts = operation.op.ops or (operation.op,)
        keys = [part.key for part in parts]
        return any(has(space) and key.startswith(space.prefix) for space in self._spaces for key in keys)

    def _may_exceed(self, operation: Operation) -> bool:
        parts = operation.op.ops or (operation.op,)
        return any(part.code in _GROWING for part in parts) and self._is_in_namespace(
            operation, lambda space: space.keys_max > 0 or space.bytes_max > 0
        )


_RESULTS, _BYTES = 64, 1 << 20
"""Bounds of the retry table that clients of a run can reach only when the bounds are below these."""


def is_invalid(op: Op) -> bool:
    """Return True if every server must refuse the operation."""
    if isinstance(op, Batch | Transact):
        return not op.ops or any(part.code not in IN_BATCH or is_invalid(part) for part in op.ops)
    return len(op.key) > KEY_BYTES_MAX


def _may_be_no_number(op: Op) -> bool:
    parts = op.ops or (op,)
    return any(part.code == Code.INCREMENT for part in parts)


# docs/protocol.md P22, P27
def _names_a_sequence(operation: Operation) -> bool:
    return operation.level in (Level.SESSION, Level.STALE) or operation.token > 0
