"""Limits how many pieces of work begin at about the same time. Work that is stuck does not count. Decides only."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class LatelyBegun(Generic[Name]):
    """The pieces of work that were begun within the last `lately_s` seconds and have not ended. Older pieces no longer
    count: they wait for a partition that does not answer, and must not delay work for other partitions."""

    def __init__(self, most: int, lately_s: float) -> None:
        self._most, self._lately_s = most, lately_s
        self._begun: dict[Name, float] = {}

    def has_capacity(self, now: float) -> bool:
        """Return True if another piece of work may begin at time `now`, in seconds."""
        begun = self._begun
        while begun and now - begun[oldest := next(iter(begun))] >= self._lately_s:
            del begun[oldest]
        return len(begun) < self._most

    def begin(self, name: Name, now: float) -> None:
        self._begun[name] = now

    def end(self, name: Name) -> None:
        self._begun.pop(name, None)
