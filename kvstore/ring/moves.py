"""A planned change of owner of one token range, and the pace of such changes. Values; decides only.

    PLANNED ──begin──► COPYING ──flip──► FLIPPED ──finish──► (gone)
       │                  │                 ▲
     cancel             cancel              │ flip: the release was logged before the cancel was seen
       ▼                  ▼                 │
    (gone)           CANCELLING ────────────┘
                          └──────cancelled──► (gone)

The logs of the source and the target decide which of them owns the range. The ring follows the logs and serves only for
routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvstore.ring.hashing import TOKENS
from kvstore.types import PartitionId

MoveId = NewType("MoveId", int)
"""A number that identifies a move within the cluster. Ids increase and are never reused."""
FIRST_MOVE = MoveId(1)


class MoveState(StrEnum):
    """The state of a move; the module's diagram shows the transitions."""

    PLANNED = "planned"
    """The move has not begun: neither log contains it."""
    COPYING = "copying"
    """The target may have logged its import. The source owns the range until the source has logged the release."""
    CANCELLING = "cancelling"
    """The move is to be cancelled, unless the source has already logged the release."""
    FLIPPED = "flipped"
    """The target has logged that it owns the range, and the ring routes the range to the target. The source has yet to
    drop its copy."""


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one token range from partition `source` to partition `target`. A range has at most one move."""

    id: MoveId
    source: PartitionId
    target: PartitionId
    start: int
    """The token before the first one that moves, or TOKENS - 1 if the first one is token 0."""
    end: int
    """The last token that moves. The range never wraps around."""
    state: MoveState = MoveState.PLANNED
    attempt: int = 0
    """Number of the copy attempt, counted by the target; 0 before the first attempt."""

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
        """Return True if the token is in the range that moves."""
        return self.first <= token <= self.end


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast ranges move, for the whole cluster."""

    paused: bool = False
    """If True, no move begins, copies or freezes. A range that is already frozen completes its move first."""
    bytes_per_s: int = 32 << 20
    """Maximum number of bytes per second that each target copies; 0 means no limit."""
    parallel: int = 1
    """Maximum number of moves that one target copies at the same time."""

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0 or self.parallel < 1:
            raise ValueError(f"expected bytes_per_s >= 0 and parallel >= 1, got {self.bytes_per_s} and {self.parallel}")


@dataclass(frozen=True, slots=True)
class Journey:
    """The moves planned since the ring last had no moves. Progress is measured against these totals."""

    moves: int = 0
    tokens: int = 0
    began_ms: int = 0
    """Wall clock in ms when the first of these moves was planned; 0 if unknown."""
