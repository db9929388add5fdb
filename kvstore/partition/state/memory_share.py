"""Choice of the write buffers of a node that become files when together they are too large. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def largest_first(sizes: Mapping[K, int], *, excess: int) -> list[K]:
    """Return those that free `excess` bytes, or all there are, the largest first: so that the files become as large as
    they can, and what is hardly written to is not flushed for what is. Of one size the first in `sizes` goes first."""
    chosen: list[K] = []
    for each in sorted(sizes, key=lambda each: -sizes[each]):
        if excess <= 0 or not sizes[each]:
            break
        chosen.append(each)
        excess -= sizes[each]
    return chosen


def cache_bytes(budget: int, *, index_bytes: int, least: int) -> int:
    """Return what is left of the budget for write buffers and blocks beside the indexes, `least` at least: these cannot
    be given up, and without blocks every read would go to the disk."""
    return max(least, budget - index_bytes)
