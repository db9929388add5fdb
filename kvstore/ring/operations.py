"""Remembers the latest operations on the ring by ids that operators choose, so that a request whose answer was lost is
done once, however often it is sent (docs/protocol.md, H11). Values; decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kvstore.types import PartitionId

REMEMBERED_MAX = 32
"""Maximum number of operations whose results the ring keeps: far more than a few operators issue while one of them
waits."""
FORGOTTEN_MAX = 4_096
"""Maximum number of older operations of which the ring keeps only a mark, four bytes each: a repeated request is
refused instead of done twice."""
MARK_BYTES = 4
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class RingOperation(NamedTuple):
    """One change of the ring that was made, and its result."""

    id: str
    asked: str
    """Hash of the request. Another request under the same id is refused."""
    before: int
    """The version that the operation changed. `version` is the one that it made."""
    version: int
    first_move: int
    """The first move that it planned. Its moves are those from here up to, not including, `next_move`."""
    next_move: int
    joined: tuple[PartitionId, ...]
    """The partitions that it added."""


def find(operations: Iterable[RingOperation], id: str) -> RingOperation | None:
    """Return the operation's result; None if it was not done, or too long ago."""
    return next((each for each in operations if each.id == id), None) if id else None


def mark_of(id: str) -> str:
    """Return the mark that the ring keeps of an operation whose result it has dropped. Two ids may share a mark: the
    later one is refused."""
    return blake2b(id.encode(), digest_size=MARK_BYTES).hexdigest()


def remember(
    operations: tuple[RingOperation, ...], forgotten: tuple[str, ...], made: RingOperation
) -> tuple[tuple[RingOperation, ...], tuple[str, ...]]:
    """Return both with one more operation."""
    every = (*operations, made)
    older = every[:-REMEMBERED_MAX]
    return every[-REMEMBERED_MAX:], (*forgotten, *(mark_of(each.id) for each in older))[-FORGOTTEN_MAX:]
