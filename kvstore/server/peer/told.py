"""Chooses what one link tells of the partitions' progress. Decides only.

An answer must not be heard before how far its partition is (docs/protocol.md P22): so each frame of answers says that
of the partitions that are asked. Told once is known at the other end for as long as the link stands; a frame that said
it of every partition that had ever been asked there took longer than its answers.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.types import PartitionId


class Told:
    """The partitions of which answers are to come, and what was last told of each."""

    def __init__(self) -> None:
        self._asked: dict[PartitionId, None] = {}
        self._last: dict[PartitionId, tuple[int, int]] = {}

    def ask(self, partition: PartitionId) -> None:
        """Operations on it have come."""
        self._asked[partition] = None

    def news(self, progress: Callable[[PartitionId], tuple[int, int]]) -> list[tuple[str, int, int]]:
        """Return what the next frame has to tell: (partition, sequence, leader's time in ms)."""
        found = []
        for partition in self._asked:
            now = progress(partition)
            if self._last.get(partition) != now:
                self._last[partition] = now
                found.append((str(partition), *now))
        return found

    def rest(self) -> None:
        """No answer is to come."""
        self._asked.clear()
