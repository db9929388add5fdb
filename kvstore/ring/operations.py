"""The operations that operators have lately asked of the ring, by ids that they have drawn: so that a request whose
answer was lost is done once, however often it is sent (docs/protocol.md, H11). Values; decides only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from kvstore.types import PartitionId

REMEMBERED_MAX = 32
"""Of them the ring keeps the last: far more than a few operators do while one of them wonders."""
FORGOTTEN_MAX = 4_096
"""Of older ones it keeps that they were made, in four bytes each: who asks again is refused, instead of done twice."""
MARK_BYTES = 4
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class Operation(NamedTuple):
    """One change of the ring that was made, and what came of it."""

    id: str
    asked: str
    """Hash of the request: another one under the same id is refused."""
    before: int
    """The version that it changed, and the one that it made."""
    version: int
    first_move: int
    """The moves that it planned: from this one, below the next."""
    next_move: int
    joined: tuple[PartitionId, ...]
    """The partitions that it added."""


def find(operations: Iterable[Operation], id: str) -> Operation | None:
    """Find the operation's result; None if it was not done, or long ago."""
    return next((each for each in operations if each.id == id), None) if id else None


def mark_of(id: str) -> str:
    """Make the mark that the ring keeps of an operation that it has forgotten. Two ids may share one: the later is
    refused."""
    return blake2b(id.encode(), digest_size=MARK_BYTES).hexdigest()


def remember(
    operations: tuple[Operation, ...], forgotten: tuple[str, ...], made: Operation
) -> tuple[tuple[Operation, ...], tuple[str, ...]]:
    """Both with one more."""
    every = (*operations, made)
    older = every[:-REMEMBERED_MAX]
    return every[-REMEMBERED_MAX:], (*forgotten, *(mark_of(each.id) for each in older))[-FORGOTTEN_MAX:]
