"""A planned change of owner of one token range, and the pace of such changes. Values; decides only.

    PLANNED ──begin──► COPYING ──flip──► FLIPPED ──finish──► (gone)
       │                  │                 ▲
     cancel             cancel              │ flip: the release was logged before the cancel was seen
       ▼                  ▼                 │
    (gone)           CANCELLING ────────────┘
                          └──────cancelled──► (gone)

The logs of source and target decide who owns the range; the ring follows them, for routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvstore.ring.hashing import TOKENS
from kvstore.types import PartitionId

MoveId = NewType("MoveId", int)
"""Unique in the cluster, rising, never reused."""
FIRST_MOVE = MoveId(1)


class MoveState(StrEnum):
    PLANNED = "planned"
    """Not begun: neither log contains it."""
    COPYING = "copying"
    """The target may have logged its import. The source owns the range until it has logged the release."""
    CANCELLING = "cancelling"
    """To be cancelled, unless the source has logged the release already."""
    FLIPPED = "flipped"
    """The target has logged that it owns the range, and the ring says so. The source has yet to drop it."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one token range from `source` to `target`. There is at most one move of a range."""

    id: MoveId
    source: PartitionId
    target: PartitionId
    start: int
    """The token before the first one that moves; TOKENS - 1 if that is token 0."""
    end: int
    """The last token that moves. The range never wraps around."""
    state: MoveState = MoveState.PLANNED
    attempt: int = 0
    """Number of the copy attempt, counted by the target; 0 until the first."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end < TOKENS:
            raise ValueError(
                f"move {self.id}: expected a range that does not wrap around, got ({self.start}, {self.end}]"
            )
        if self.source == self.target:
            raise ValueError(f"move {self.id}: expected a target other than the source, got {self.source}")

    @property
    def first(self) -> int:
        """The first token that moves. The range is `first` to `end`, both included."""
        return (self.start + 1) % TOKENS

    @property
    def size(self) -> int:
        """Number of tokens that move."""
        return self.end - self.first + 1

    def holds(self, token: int) -> bool:
        """Return True if the token moves."""
        return self.first <= token <= self.end


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of moves, in the whole cluster."""

    paused: bool = False
    """If True, no move begins, copies or freezes. A range that is frozen already completes first."""
    bytes_per_s: int = 32 << 20
    """Bytes per second that each target may copy; 0: unlimited."""
    parallel: int = 1
    """Moves that one target copies at the same time."""

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0 or self.parallel < 1:
            raise ValueError(f"expected bytes_per_s >= 0 and parallel >= 1, got {self.bytes_per_s} and {self.parallel}")


@dataclass(frozen=True, slots=True)
class Journey:
    """The moves planned since the ring last had none; progress is measured against them."""

    moves: int = 0
    tokens: int = 0
    began_ms: int = 0
    """Wall clock when the first of them was planned; 0 if unknown."""
