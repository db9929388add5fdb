"""Tracks refusals that another server has not received yet. Decides only.

When an operation is refused here, because its partition is not led here or because it belongs to another partition, the
other server sends it again. Later operations on the same partition or key that it sent before it received the refusal
must not be executed first. Therefore they are refused too (docs/protocol.md M15).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from kvstore.errors import Moved, NotLeader
from kvstore.partition.state.commands import Op
from kvstore.partition.state.traits import UNORDERED
from kvstore.server.routing.pending import keys_of
from kvstore.types import PartitionId

_NOT_SENT = 1 << 62
"""A frame number that no link reaches: the refusal has not been sent yet."""
Name = TypeVar("Name")


class RefusedNames(Generic[Name]):
    """Names of partitions or keys with refused operations. A name stays until the other server has received the
    refusals."""

    def __init__(self) -> None:
        self.frame_of: dict[Name, int] = {}
        """For each name the number of the result frame that carries its last refusal, in the order of these frames."""
        self._unsent: list[Name] = []

    def refuse(self, names: Iterable[Name]) -> None:
        for name in names:
            self.frame_of[name] = _NOT_SENT
            self._unsent.append(name)

    def note_sent(self, frame: int) -> None:
        """Record that all refusals so far have been sent, with this result frame or an earlier one."""
        for name in self._unsent:
            self.frame_of.pop(name, None)
            self.frame_of[name] = frame
        self._unsent.clear()

    def forget(self, received: int) -> None:
        """Drop the names whose refusals are among the `received` result frames that the other server has received.
        Operations that arrive from now on were sent after that."""
        while self.frame_of:
            name = next(iter(self.frame_of))
            if self.frame_of[name] > received:
                break
            del self.frame_of[name]


class UnreceivedRefusals:
    """The refusals on one connection that the other server has not received. Result frames are counted from 1, as
    the other server counts them."""

    def __init__(self) -> None:
        self.partitions = RefusedNames[PartitionId]()
        self.keys = RefusedNames[bytes]()
        """Keys of refused writes. Reads keep no order."""

    def of(self, partition: PartitionId, op: Op, received: int) -> NotLeader | Moved | None:
        """Return the error with which an operation must be refused, or None if it may be executed. `received` is the
        number of result frames that its sender had received."""
        if self.partitions.frame_of.get(partition, 0) > received:
            return NotLeader(partition)
        keys = self.keys.frame_of
        if keys and op.code not in UNORDERED and any(keys.get(key, 0) > received for key in keys_of(op)):
            return Moved("", 0)
        return None

    def refuse(self, op: Op) -> None:
        """Record that the operation belongs to another partition. From now on, every write on its keys is refused."""
        if op.code not in UNORDERED:
            self.keys.refuse(keys_of(op))

    def note_sent(self, frame: int) -> None:
        self.partitions.note_sent(frame)
        self.keys.note_sent(frame)

    def forget(self, received: int) -> None:
        self.partitions.forget(received)
        self.keys.forget(received)
