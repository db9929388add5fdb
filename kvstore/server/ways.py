"""What goes from the dispatcher to replicas here and to links elsewhere, and what it asks of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.partition.commands import Code, Op, Sink
from kvstore.partition.operations import size_of
from kvstore.types import PartitionId, ServerId

KEYLESS = frozenset({int(Code.SCAN), int(Code.SCAN_TOKENS), int(Code.COUNT), int(Code.DELETE_RANGE)})
"""Codes of operations that go to a partition, and not to whoever owns a key."""
UNORDERED = KEYLESS | {int(Code.GET), int(Code.META)}
"""Codes of operations that need not be done in the order in which they came (docs/protocol.md M15)."""
_PUT, _BATCH = int(Code.PUT), int(Code.BATCH)
_LARGE = frozenset({int(Code.APPEND), _BATCH})

Waiting = tuple[int, Op, Sink, int, float, bool]
"""An operation on its way: (order, operation, sink, token, deadline or 0 before it had to wait, whether another server
sent it). A plain tuple: each forwarded operation is one."""
UnderWay = tuple[Callable[[], bool], int, Op]
"""What says whether an operation still is on a link; its place in the order, and the operation."""


def written_bytes(op: Op) -> int:
    """What an operation holds in memory, if that may be much."""
    return len(op[2]) if op[0] == _PUT else size_of(op) if op[0] in _LARGE else 0


def keys_of(op: Op) -> list[bytes]:
    """The keys of an operation that names some."""
    return [op[1]] if op[0] != _BATCH else [op[1], *(each[1] for each in op[2])]


class LocalReplica(Protocol):
    """A replica on this node: kvstore.partition.Partition."""

    @property
    def serving(self) -> bool: ...

    def submit(self, op: Op, sink: Sink, token: int) -> None: ...

    def expel(self) -> None:
        """Turn away what waits here and is another partition's."""
        ...


class Links(Protocol):
    """Links to other servers: kvstore.server.peer.PeerLinks."""

    def submit(self, server: ServerId, partition: PartitionId, waiting: Waiting) -> bool:
        """Send an operation. False if there is no address for the server, or its link is down: nothing was sent."""
        ...

    def is_clear(self, server: ServerId, partition: PartitionId) -> bool:
        """Whether no operation on the partition is under way to the server."""
        ...

    def flush(self) -> None:
        """Send what was submitted."""
        ...

    def astray(self, partition_of: Callable[[bytes], PartitionId]) -> list[UnderWay]:
        """The operations under way to a partition that is not their key's."""
        ...
