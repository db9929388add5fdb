"""What was refused to another server and it has not heard of yet. Decides only.

It sends out again what comes back as not led here, or as another partition's. What it sent meanwhile on the same
partition or key must not be done before that: it is refused too (docs/protocol.md M15).
"""

from __future__ import annotations

from collections import deque

from kvstore.errors import Moved, NotLeader, StoreError
from kvstore.partition.commands import Op
from kvstore.server.ways import UNORDERED, keys_of
from kvstore.types import PartitionId

_NOT_SAID = 1 << 62
"""More frames than any link ever carries."""


class Refusals:
    """One connection's. Frames of results are counted from 1, as the other server counts them."""

    def __init__(self) -> None:
        self._said_by: dict[PartitionId | bytes, int] = {}
        """Partitions, and keys of writes → the frame of results that tells of their last refusal."""
        self._unsaid: list[PartitionId | bytes] = []
        """Those of them of which the next frame tells."""
        self._said: deque[tuple[int, PartitionId | bytes]] = deque()
        self._turned_away: dict[int, list[bytes]] = {}
        """Keys of writes that are refused, and whose results are not given yet, by number."""

    def __len__(self) -> int:
        return len(self._said_by)

    def of(self, partition: PartitionId, op: Op, heard: int) -> StoreError | None:
        """Why an operation must not be done that was sent by who had taken in `heard` frames of results."""
        said_by = self._said_by
        if said_by.get(partition, 0) > heard:
            return NotLeader(partition)
        if op[0] not in UNORDERED and any(said_by.get(key, 0) > heard for key in keys_of(op)):
            return Moved("", 0)
        return None

    def turn_away(self, number: int, op: Op) -> None:
        """The operation is another partition's: what comes on its keys waits for it from now on."""
        if op[0] not in UNORDERED:
            keys = self._turned_away[number] = keys_of(op)
            self._said_by.update(dict.fromkeys(keys, _NOT_SAID))

    def give(self, number: int, error: StoreError) -> None:
        """The next frame tells of this one."""
        names: list[PartitionId | bytes] = [*self._turned_away.pop(number, ())]
        if isinstance(error, NotLeader):
            names.append(PartitionId(error.partition))
        self._said_by.update(dict.fromkeys(names, _NOT_SAID))
        self._unsaid += names

    def tell(self, frame: int) -> None:
        """All that was given stands in this frame of results, or in an earlier one."""
        for name in self._unsaid:
            self._said_by[name] = frame
            self._said.append((frame, name))
        self._unsaid.clear()

    def forget(self, heard: int) -> None:
        """Nothing comes any more from who had not taken in so many frames."""
        while self._said and self._said[0][0] <= heard:
            frame, name = self._said.popleft()
            if self._said_by.get(name) == frame:
                del self._said_by[name]
