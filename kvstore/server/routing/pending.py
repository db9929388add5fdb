"""An operation that this server routes, and functions that tell what routing needs to know about an operation.
Decides only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvstore.errors import InvalidRequest, Moved, NotLeader
from kvstore.partition.state.commands import Append, Batch, Op, Put, Sink
from kvstore.partition.state.operations import size_of
from kvstore.types import PartitionId


class Pending(msgspec.Struct):
    """One operation, from when it cannot be handed directly to the local leader until its sink has the result."""

    order: int
    """Its position in the order of all operations that this server routes."""
    op: Op
    sink: Any
    """The Sink of the operation."""
    token: int
    size: int = 0
    """Its `written_bytes`, set when a flight carries it."""
    deadline: float = 0.0
    """When it is refused, in seconds of the clock; 0 until it has to wait."""
    left_s: float = 0.0
    """Seconds of its timeout that remained when it began to wait for its client's turn. The timeout does not run during
    that wait. 0 if nothing of the timeout has been used."""
    is_of_peer: bool = False
    """True if another server sent the operation. Such an operation is executed here or refused, never forwarded."""

    def __repr__(self) -> str:
        return f"<Pending {self.order} {self.op!r}>"


class PeerSink(Sink):
    """Base class of sinks of operations that other servers sent. Those servers send refused operations again
    themselves."""

    def reject(self, op: Op, token: int, error: NotLeader | Moved) -> None:
        """Handle the refusal of an operation. Called instead of `complete`, possibly from inside `submit`. Later
        operations are not executed until the other server has received this refusal."""
        raise NotImplementedError


def written_bytes(op: Op) -> int:
    """Return the bytes of keys and values that an operation holds in memory; 0 for an operation that always holds
    few."""
    if op.__class__ is Put:
        return len(op.value)
    return size_of(op) if op.__class__ is Append or op.ops or op.end else 0


def keys_of(op: Op) -> list[bytes]:
    """Return the keys of an operation that names keys."""
    return [op.key, *(each.key for each in op.ops)]


def check_one_partition(op: Batch, partition_of: Callable[[bytes], PartitionId]) -> None:
    """Raise InvalidRequest if the keys of a batch belong to several partitions. The error names these partitions."""
    owners = sorted({partition_of(each.key) for each in op.ops})
    if len(owners) > 1:
        raise InvalidRequest(
            f"expected all keys of a batch in one partition, got keys of {' and '.join(owners)}; "
            "put the same {tag} into the keys"
        )
