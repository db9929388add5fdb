"""Chooses which write buffers of a node to flush when their total size is too large. Decides only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")


def largest_first(sizes: Mapping[K, int], *, excess: int) -> list[K]:
    """Return the largest buffers, in descending order of size, until their flush frees `excess` bytes; all buffers if
    that is not enough. Flushing the largest buffers makes the files as large as possible, and never flushes a hardly
    used buffer to make space for a busy one. Buffers of equal size keep their order in `sizes`."""
    chosen: list[K] = []
    for each in sorted(sizes, key=lambda each: -sizes[each]):
        if excess <= 0 or not sizes[each]:
            break
        chosen.append(each)
        excess -= sizes[each]
    return chosen


def cache_bytes(budget: int, *, index_bytes: int, least: int) -> int:
    """Return the bytes that the indexes leave of the budget for write buffers and blocks, but at least `least`. The
    minimum is needed because indexes cannot be dropped, and without cached blocks every read would go to the disk."""
    return max(least, budget - index_bytes)
