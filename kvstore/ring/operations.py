"""Records the latest operations on the ring under ids that operators choose. A request whose answer was lost can then
be sent again and is still carried out only once (docs/protocol.md, H11). Values; decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kvstore.types import PartitionId

REMEMBERED_MAX = 32
"""Maximum number of operations whose results the ring keeps. Operators issue far fewer while one of them waits for an
answer."""
FORGOTTEN_MAX = 4_096
"""Maximum number of older operations of which the ring keeps only a mark of four bytes. A repeated request with such a
mark is refused, so it is not carried out twice."""
MARK_BYTES = 4
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class RingOperation(NamedTuple):
    """A completed change of the ring, and its result."""

    id: str
    asked: str
    """Hash of the request. Another request under the same id is refused."""
    before: int
    """The ring version before the operation."""
    version: int
    """The ring version that the operation created."""
    first_move: int
    """Id of the first move that the operation planned. The operation planned the moves from `first_move` up to, but not
    including, `next_move`."""
    next_move: int
    joined: tuple[PartitionId, ...]
    """The partitions that it added."""


def find(operations: Iterable[RingOperation], id: str) -> RingOperation | None:
    """Return the operation with this id. Returns None if the id is empty, no such operation was done, or its result has
    been dropped."""
    return next((each for each in operations if each.id == id), None) if id else None


def mark_of(id: str) -> str:
    """Return the four-byte mark, in hexadecimal digits, that the ring keeps of an operation after dropping its result.
    If two ids share a mark, the later operation is refused."""
    return blake2b(id.encode(), digest_size=MARK_BYTES).hexdigest()


def remember(
    operations: tuple[RingOperation, ...], forgotten: tuple[str, ...], made: RingOperation
) -> tuple[tuple[RingOperation, ...], tuple[str, ...]]:
    """Add the completed operation `made`. Returns the new operations and the new marks: the oldest operations beyond
    REMEMBERED_MAX become marks, and the oldest marks beyond FORGOTTEN_MAX are dropped."""
    every = (*operations, made)
    older = every[:-REMEMBERED_MAX]
    return every[-REMEMBERED_MAX:], (*forgotten, *(mark_of(each.id) for each in older))[-FORGOTTEN_MAX:]
