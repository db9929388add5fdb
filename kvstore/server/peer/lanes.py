"""Gathers the operations that leave with one frame, in a lane for each partition. Decides only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.partition.state.commands import Code, Op
from kvstore.server.peer.frames import Lane
from kvstore.types import PartitionId

_GET, _PUT = int(Code.GET), int(Code.PUT)


class Lanes:
    """Operations that wait for this turn's frame. `begin` is called when the first has come since they were taken."""

    def __init__(self, begin: Callable[[], object]) -> None:
        self._begin = begin
        self._lanes: dict[PartitionId, Lane] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def add(self, partition: PartitionId, number: int, op: Op) -> None:
        lane = self._lanes.get(partition) or self._new(partition)
        if op[0] == _GET:
            lane.gets.append((number, op))
        elif op[0] == _PUT:
            lane.puts.append((number, op))
        else:
            lane.others.append((number, op))

    def add_puts(self, partition: PartitionId, numbers: range, ops: Sequence[Op]) -> None:
        """The same for puts."""
        lane = self._lanes.get(partition) or self._new(partition)
        lane.puts += zip(numbers, ops, strict=True)

    def _new(self, partition: PartitionId) -> Lane:
        if not self._lanes:
            self._begin()
        lane = self._lanes[partition] = Lane(partition, [], [], [])
        return lane

    def take(self) -> list[Lane]:
        """Take all lanes, for the frame."""
        lanes, self._lanes = self._lanes, {}
        return list(lanes.values())

    def numbers(self) -> list[int]:
        """The numbers of the operations that wait."""
        return [
            number
            for lane in self._lanes.values()
            for column in (lane.gets, lane.puts, lane.others)
            for number, _ in column
        ]
