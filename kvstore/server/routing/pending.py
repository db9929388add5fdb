"""An operation that this server routes, and what routing needs to know about operations. Decides only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvstore.errors import InvalidRequest, Moved, NotLeader
from kvstore.partition.state.commands import Code, Op, Sink
from kvstore.partition.state.operations import size_of
from kvstore.partition.state.traits import WITH_VALUE
from kvstore.types import PartitionId

_PUT, _BATCH = int(Code.PUT), int(Code.BATCH)
_LARGE = WITH_VALUE | {_BATCH}


class Pending(msgspec.Struct):
    """One operation, from the moment it cannot simply be handed to the local leader."""

    order: int
    """Its position among the operations that this server routes."""
    op: Op
    sink: Any
    """A Sink."""
    token: int
    size: int = 0
    """Its `written_bytes`, once a flight carries it."""
    deadline: float = 0.0
    """When it is refused, in seconds of the clock; 0 before it had to wait."""
    left_s: float = 0.0
    """Remaining time when it began to wait for its client's turn, which does not count; 0: all of it."""
    is_of_peer: bool = False
    """True if another server sent it: it is done here or refused, never forwarded."""

    def __repr__(self) -> str:
        return f"<Pending {self.order} {self.op!r}>"


class PeerSink(Sink):
    """Base class of the sinks of other servers, which send refused operations again themselves."""

    def turn_away(self, op: Op, token: int, error: NotLeader | Moved) -> None:
        """Called instead of `complete`, also from inside `submit`: later operations are not done until the other server
        has received this refusal."""
        raise NotImplementedError


def written_bytes(op: Op) -> int:
    """Return the bytes that an operation holds in memory, if that may be much."""
    return len(op[2]) if op[0] == _PUT else size_of(op) if op[0] in _LARGE else 0


def keys_of(op: Op) -> list[bytes]:
    """Return the keys of an operation that names keys."""
    return [op[1]] if op[0] != _BATCH else [op[1], *(each[1] for each in op[2])]


def check_one_partition(op: Op, partition_of: Callable[[bytes], PartitionId]) -> None:
    """Raise InvalidRequest for a batch across partitions, and name them."""
    owners = sorted({partition_of(each[1]) for each in op[2]})
    if len(owners) > 1:
        raise InvalidRequest(f"expected all keys of a batch in one partition, got keys of {' and '.join(owners)}")
