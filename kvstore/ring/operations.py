"""What operators have asked of the ring lately, by ids that they have drawn: so that a request whose answer was lost is
done once, however often it is sent (docs/protocol.md, H11). Pure values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.types import PartitionId

REMEMBERED_MAX = 32
"""Of them the ring keeps the last: far more than a few operators do while one of them wonders."""
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
    """What came of the operation; None if it was not done, or long ago."""
    return next((each for each in operations if each.id == id), None) if id else None
