"""Decides the next step of a move's target: a function of its own log and of the ring. Decides only; import_driver.py
performs.

    BEGIN ─► COPY ─► FOLLOW ─► ASK ─► FLIP ─► (the source drops)
      ▲        │        │       │
      └─ WIPE ◄┴────────┴───────┘      GIVE_UP ─► WIPE ─► FORGET      (cancelled)

Nothing is stored outside the log, so a new leader continues where the former leader stopped (docs/protocol.md M13).
"""

from __future__ import annotations

from enum import StrEnum

from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.rows import ALL_DATA
from kvstore.partition.state.tokens import TokenSpan
from kvstore.ring.moves import Move, MoveState


class ImportStep(StrEnum):
    """The steps of a move. DO NOT REORDER: tests iterate over them."""

    WAIT = "wait"
    """Moves are paused."""
    BEGIN = "begin"
    """Choose a pin, change the ring, log IMPORT-BEGIN."""
    COPY = "copy"
    """Log one page."""
    FOLLOW = "follow"
    """Log the changes in the source's log, have the range frozen, log IMPORT-END."""
    ASK = "ask"
    """Request RELEASE, and log OWN."""
    FLIP = "flip"
    """Change the ring's owner of the range."""
    GIVE_UP = "give up"
    """Ask the source whether it keeps the range."""
    WIPE = "wipe"
    """Log a DROP of some of the copied rows."""
    FORGET = "forget"
    """Remove the cancelled move from the ring."""
    DONE = "done"
    """The source does the rest."""


def span_of(move: Move) -> TokenSpan:
    """Return the tokens that the move covers."""
    return TokenSpan(move.first, move.end)


def copied_part(ownership: Ownership, move: Move) -> float:
    """Return the fraction of the range that has been copied, from 0 to 1, estimated from the token at which copying
    continues."""
    if move.state is MoveState.FLIPPED or (ownership.is_founded and ownership.owned.covers(span_of(move))):
        return 1.0
    found = ownership.import_of(move.id)
    if found is None or found.is_dropping:
        return 0.0
    if not found.cursor or found.cursor >= ALL_DATA[1]:
        return 1.0  # all records have come; they precede intents, decisions and request ids
    token = int.from_bytes(found.cursor[1:5].ljust(4, b"\0"), "big")
    return min(1.0, max(0.0, (token - move.first) / move.size))


def next_step(ownership: Ownership, move: Move, *, is_paused: bool) -> ImportStep:
    """Return the next step of `move` on a target with this ownership."""
    if move.state is MoveState.FLIPPED:
        return ImportStep.DONE
    if ownership.owned.covers(span_of(move)) and ownership.is_founded:
        return ImportStep.FLIP
    cancelled = move.state is MoveState.CANCELLING
    found = ownership.import_of(move.id)
    if found is None:
        return ImportStep.FORGET if cancelled else ImportStep.WAIT if is_paused else ImportStep.BEGIN
    if found.is_dropping:
        return ImportStep.WIPE
    if cancelled:
        return ImportStep.GIVE_UP
    if found.end is not None:
        return ImportStep.ASK
    if is_paused:
        return ImportStep.WAIT
    return ImportStep.COPY if found.cursor else ImportStep.FOLLOW
