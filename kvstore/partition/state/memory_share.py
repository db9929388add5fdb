"""Chooses which write buffers of a node to flush when together they are too large. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def largest_first(sizes: Mapping[K, int], *, excess: int) -> list[K]:
    """Return the buffers whose flush frees `excess` bytes, or all, the largest first. This makes the files as large as
    possible, and does not flush a hardly used buffer for the sake of a busy one. Buffers of equal size keep their order
    in `sizes`."""
    chosen: list[K] = []
    for each in sorted(sizes, key=lambda each: -sizes[each]):
        if excess <= 0 or not sizes[each]:
            break
        chosen.append(each)
        excess -= sizes[each]
    return chosen


def cache_bytes(budget: int, *, index_bytes: int, least: int) -> int:
    """Return what the indexes leave of the budget for write buffers and blocks, but at least `least`: indexes cannot be
    dropped, and without blocks every read would go to the disk."""
    return max(least, budget - index_bytes)
