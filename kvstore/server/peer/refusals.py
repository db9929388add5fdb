"""Remembers the refusals of which another server has not heard yet. Decides only.

It sends out again what comes back as not led here, or as another partition's. What it sent meanwhile on the same
partition or key must not be done before that: it is refused too (docs/protocol.md M15).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from kvstore.errors import Moved, NotLeader
from kvstore.partition.state.commands import Op
from kvstore.partition.state.traits import UNORDERED
from kvstore.server.routing.pending import keys_of
from kvstore.types import PartitionId

_NOT_SAID = 1 << 62
"""More frames than any link ever carries."""
Name = TypeVar("Name")


class Unheard(Generic[Name]):
    """Names, each with the frame of results that tells of its last refusal."""

    def __init__(self) -> None:
        self.said_by: dict[Name, int] = {}
        """In the order of these frames."""
        self._unsaid: list[Name] = []

    def refuse(self, names: Iterable[Name]) -> None:
        for name in names:
            self.said_by[name] = _NOT_SAID
            self._unsaid.append(name)

    def tell(self, frame: int) -> None:
        """All that was refused stands in this frame, or in an earlier one."""
        for name in self._unsaid:
            self.said_by.pop(name, None)
            self.said_by[name] = frame
        self._unsaid.clear()

    def forget(self, heard: int) -> None:
        """Nothing comes any more from who had not taken in so many frames."""
        while self.said_by:
            name = next(iter(self.said_by))
            if self.said_by[name] > heard:
                break
            del self.said_by[name]


class Refusals:
    """One connection's. Frames of results are counted from 1, as the other server counts them."""

    def __init__(self) -> None:
        self.partitions = Unheard[PartitionId]()
        self.keys = Unheard[bytes]()
        """Of writes."""

    def of(self, partition: PartitionId, op: Op, heard: int) -> NotLeader | Moved | None:
        """Why an operation must not be done that was sent by who had taken in `heard` frames of results."""
        if self.partitions.said_by.get(partition, 0) > heard:
            return NotLeader(partition)
        keys = self.keys.said_by
        if keys and op[0] not in UNORDERED and any(keys.get(key, 0) > heard for key in keys_of(op)):
            return Moved("", 0)
        return None

    def refuse(self, op: Op) -> None:
        """It is another partition's: no write that comes on its keys is done from now on."""
        if op[0] not in UNORDERED:
            self.keys.refuse(keys_of(op))

    def tell(self, frame: int) -> None:
        self.partitions.tell(frame)
        self.keys.tell(frame)

    def forget(self, heard: int) -> None:
        self.partitions.forget(heard)
        self.keys.forget(heard)
