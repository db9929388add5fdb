"""The tokens that a leader may answer for and write to: those that its state owns, less those that it has sent away.
Decides only.

A FREEZE stops writes, and a RELEASE everything, from the moment in which they are sent: others may learn that the
record is acknowledged before this leader does. What gives tokens back counts from the moment in which it is applied. No
clock is asked (docs/protocol.md M5, M7).
"""

from __future__ import annotations

from collections import deque

from kvstore.errors import Corrupted, Moved, Unavailable
from kvstore.partition.state.move_records import Freeze, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.state import State
from kvstore.partition.state.tokens import PART, WHOLE, Span
from kvstore.wal.ledger_list import BEGINNING as NOWHERE


class ServingRanges:
    """The tokens that one leadership serves."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._sent: deque[MoveRecord] = deque()
        self.held: set[bytes] = set()
        """Records of batches that wait for a range which takes no writes: those that might be written wait too."""
        self._recompute()

    @property
    def ownership(self) -> Ownership:
        """The ownership that is applied."""
        return self._state.ownership

    # ── what is asked per operation ───────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md M1
    def may_read(self, row_key: bytes) -> bool:
        slice_ = self.readable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.readable.holds_row(row_key))

    def may_write(self, row_key: bytes) -> bool:
        slice_ = self.writable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.writable.holds_row(row_key))

    def moved(self, row_key: bytes) -> Moved:
        """Why nobody here answers for the key."""
        return moved(self.ownership, row_key)

    # ── what is sent and applied ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, record: MoveRecord) -> None:
        """The record leaves now. Raises Unavailable, and it must not leave, if it would not fit what stands before it
        when all that was sent is applied: no replica could apply it, or anything behind it."""
        self._foresee(record)
        self._sent.append(record)
        self._recompute()
        if isinstance(record, Release):
            self.held.clear()

    def _foresee(self, record: MoveRecord) -> None:
        ownership = self.ownership
        try:
            for each in (*self._sent, record):
                ownership = ownership.after(each, NOWHERE, 0, 0)
        except (Corrupted, ValueError) as error:
            raise Unavailable(f"partition {self._state.partition}: not now: {error}") from error

    def applied(self) -> bool:
        """Note that the oldest record sent is in the state. Returns whether that changes what may be read or written:
        then it is decided anew on what waits."""
        before = self.readable, self.writable
        self._sent.popleft()
        self._recompute()
        is_changed = before != (self.readable, self.writable)
        if is_changed:
            self.held.clear()
        return is_changed

    def _recompute(self) -> None:
        self.readable = self.ownership.owned
        self.writable = self.ownership.writable
        for record in self._sent:
            if isinstance(record, Freeze):
                self.writable = self.writable.without(record.span)
            elif isinstance(record, Release):
                frozen = self.ownership.frozen_by(record.move)
                if frozen is not None:
                    self.readable = self.readable.without(frozen.span)
        self.is_freezing = self.writable != self.readable

    # ── what may be sent: everything that is under way counts as done ─────────────────────────────────────────────────

    def is_pending(self, move: int) -> bool:
        """Whether a record of the move is under way."""
        return any(not isinstance(each, Own) and getattr(each, "move", None) == move for each in self._sent)

    def may_freeze(self, move: int, span: Span) -> bool:
        """The range is owned, takes writes, and has nothing under way."""
        ownership = self.ownership
        return ownership.is_founded and self.writable.covers(span) and not self.is_pending(move)


def moved(ownership: Ownership, row_key: bytes) -> Moved:
    """Why a replica whose ownership this is does not answer for a key."""
    released = ownership.released_at(int.from_bytes(row_key[1:5], "big"))
    return Moved("" if released is None else released.target, 0)
