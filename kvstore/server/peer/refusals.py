"""Remembers the refusals of which another server has not heard yet. Decides only.

The other server sends an operation out again when it is refused here, as not led here or as another partition's. Later
operations on the same partition or key, which that server sent before it heard of the refusal, must not be done first:
they are refused too (docs/protocol.md M15).
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
"""More frames than any link ever carries."""
Name = TypeVar("Name")


class RefusedNames(Generic[Name]):
    """Partitions or keys of which operations were refused, until the other server has heard of the refusals."""

    def __init__(self) -> None:
        self.frame_of: dict[Name, int] = {}
        """The frame of results that tells of each name's last refusal. In the order of these frames."""
        self._unsent: list[Name] = []

    def refuse(self, names: Iterable[Name]) -> None:
        for name in names:
            self.frame_of[name] = _NOT_SENT
            self._unsent.append(name)

    def tell(self, frame: int) -> None:
        """Note that the refusals up to now have left with this frame, or with an earlier one."""
        for name in self._unsent:
            self.frame_of.pop(name, None)
            self.frame_of[name] = frame
        self._unsent.clear()

    def forget(self, heard: int) -> None:
        """Drop the names of refusals that the other server has heard: all that comes from now on was sent after it had
        taken in `heard` frames."""
        while self.frame_of:
            name = next(iter(self.frame_of))
            if self.frame_of[name] > heard:
                break
            del self.frame_of[name]


class UnheardRefusals:
    """The unheard refusals of one connection. Frames of results are counted from 1, as the other server counts them."""

    def __init__(self) -> None:
        self.partitions = RefusedNames[PartitionId]()
        self.keys = RefusedNames[bytes]()
        """Keys of writes; reads keep no order."""

    def of(self, partition: PartitionId, op: Op, heard: int) -> NotLeader | Moved | None:
        """Why an operation must not be done that was sent when its sender had taken in `heard` frames of results."""
        if self.partitions.frame_of.get(partition, 0) > heard:
            return NotLeader(partition)
        keys = self.keys.frame_of
        if keys and op[0] not in UNORDERED and any(keys.get(key, 0) > heard for key in keys_of(op)):
            return Moved("", 0)
        return None

    def refuse(self, op: Op) -> None:
        """Note that the operation is another partition's: from now on no write on its keys is done."""
        if op[0] not in UNORDERED:
            self.keys.refuse(keys_of(op))

    def tell(self, frame: int) -> None:
        self.partitions.tell(frame)
        self.keys.tell(frame)

    def forget(self, heard: int) -> None:
        self.partitions.forget(heard)
        self.keys.forget(heard)
