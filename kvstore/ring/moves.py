"""A planned change of owner of one token range, and how fast such changes may go. Values; decides only.

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
"""Unique in the cluster, rising, never used again."""
FIRST_MOVE = MoveId(1)


class MoveState(StrEnum):
    PLANNED = "planned"
    """Nobody has begun: neither log knows of it."""
    COPYING = "copying"
    """The target may have logged its import; the source owns the range until it has logged the release."""
    CANCELLING = "cancelling"
    """To be given up, unless the source has logged the release already."""
    FLIPPED = "flipped"
    """The target has logged that it owns the range, and the ring says so; the source has yet to drop it."""


@dataclass(frozen=True, slots=True)
class Move:
    """One token range goes from `source` to `target`. There is at most one for each range."""

    id: MoveId
    source: PartitionId
    target: PartitionId
    start: int
    """The token before the first one that moves; TOKENS - 1 if that is token 0."""
    end: int
    """The last token that moves. The range never wraps round."""
    state: MoveState = MoveState.PLANNED
    attempt: int = 0
    """Of the copy, counted by the target; 0 until the first."""

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.end < TOKENS:
            raise ValueError(f"move {self.id}: want a range that does not wrap, got ({self.start}, {self.end}]")
        if self.source == self.target:
            raise ValueError(f"move {self.id}: want another target than the source {self.source}")

    @property
    def first(self) -> int:
        """The first token that moves; `first` to `end`, both included, is the range."""
        return (self.start + 1) % TOKENS

    @property
    def size(self) -> int:
        """How many tokens move."""
        return self.end - self.first + 1

    def holds(self, token: int) -> bool:
        """Whether the token moves."""
        return self.first <= token <= self.end


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast moves may go, in the whole cluster."""

    paused: bool = False
    """No move begins, copies on or freezes; what is frozen already ends first."""
    bytes_per_s: int = 32 << 20
    """What each target may copy; 0: as fast as it can."""
    parallel: int = 1
    """Moves that one target copies at the same time."""

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0 or self.parallel < 1:
            raise ValueError(f"want bytes_per_s >= 0 and parallel >= 1, got {self.bytes_per_s} and {self.parallel}")


@dataclass(frozen=True, slots=True)
class Journey:
    """The moves planned since the ring last had none: progress is measured against them."""

    moves: int = 0
    tokens: int = 0
    began_ms: int = 0
    """Wall clock when the first of them was planned; 0 if nobody told the time."""
