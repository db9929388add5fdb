"""What a leader may answer for and write to: what its state owns, less what it has sent away. Decides only.

A FREEZE stops writes, and a RELEASE all but reads of single keys, from the moment in which they are sent: what comes of
them may be known to others before it is known here. What gives tokens back counts from the moment in which it is
applied. Reads of a released range end when its new owner asks for that, or after LINGER_S; until then the new owner
answers nothing (docs/protocol.md, Moving a range).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstore.errors import Corrupted, Moved, Unavailable
from kvstore.partition.move_records import Drop, Freeze, MoveRecord, Own, Release
from kvstore.partition.state import State
from kvstore.partition.territory import Frozen, Territory
from kvstore.partition.tokens import PART, WHOLE, Span, Tokens
from kvstore.types import Position
from kvstore.wal.ledger_list import BEGINNING as NOWHERE

LINGER_S = 1.0
"""From the send of a RELEASE on its leader reads what was released for no longer than this."""
GUARD_S = 1.25 * LINGER_S
"""So long nothing is done with what came to be owned, if its former owner does not say that it is silent: a bound on
the drift of two machines' clocks, far above what they do."""


class Timed(NamedTuple):
    """A range, until a time of the boot-time clock."""

    span: Span
    until: float


class Custody:
    """Of one leadership."""

    def __init__(self, state: State, *, reads_on: bool = True) -> None:
        """`reads_on`: whether what is released is read on. That takes clocks that can be trusted, as leases do."""
        self._state, self._linger_s = state, LINGER_S if reads_on else 0.0
        self._sent: deque[MoveRecord] = deque()
        self.held: set[bytes] = set()
        """Records of batches that wait for a range which takes no writes: those that might be written wait too."""
        self.guarded: dict[int, Span] = {}
        """By their moves: owned, but the former owner may still read."""
        self._lingering: dict[int, Timed] = {}
        self._recompute()

    @property
    def territory(self) -> Territory:
        """What is applied."""
        return self._state.territory

    # ── what is asked per operation ───────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md M1
    def may_read(self, row_key: bytes) -> bool:
        slice_ = self.readable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.readable.holds_row(row_key))

    def may_write(self, row_key: bytes) -> bool:
        slice_ = self.writable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.writable.holds_row(row_key))

    def is_elsewhere(self, row_key: bytes) -> bool:
        """Whether another partition answers for the key. Else it may be read here, or will soon be."""
        return not (self.may_read(row_key) or self.is_guarded(row_key))

    def is_guarded(self, row_key: bytes) -> bool:
        """Whether the key's operations wait here for its former owner to be silent."""
        if not self.guarded:
            return False
        token = int.from_bytes(row_key[1:5], "big")
        return any(span.holds(token) for span in self.guarded.values())

    def moved(self, row_key: bytes) -> Moved:
        """Why nobody here answers for the key."""
        return moved(self.territory, row_key)

    def may_be_shown(self, now: float) -> Tokens:
        """Of which tokens reads of single keys are answered at `now`. Those that are past their expiry need an entry
        that only their owner can log: they are answered if they are `readable`."""
        tokens = self.readable
        for span, until in self._lingering.values():
            if now < until and not tokens.meets(span):
                tokens = tokens.with_(span)
        return tokens

    # ── who answers while a range changes hands ───────────────────────────────────────────────────────────────────────

    def linger(self, move: int, now: float) -> None:
        """A RELEASE leaves `now`: what it gives away is read for a while, unless `silence` comes first."""
        frozen = self.territory.frozen_by(move)
        if frozen is not None:
            self._lingering[move] = Timed(frozen.span, now + self._linger_s)

    def silence(self, move: int) -> None:
        """What was released is not read any more. Raises Unavailable if it is not known here that it was: then this
        leader cannot speak for those that came after it."""
        if self.territory.released_by(move) is None:
            raise Unavailable(f"partition {self._state.partition}: nothing of move {move} stands as released")
        self._lingering.pop(move, None)

    def guard(self, move: int, span: Span) -> None:
        """What is owned of this range is neither read nor written, until `settle`."""
        self.guarded[move] = span
        self._recompute()

    def settle(self, move: int) -> None:
        """The former owner is silent."""
        self.guarded.pop(move, None)
        self._recompute()
        self.held.clear()

    # ── what is sent and applied ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, record: MoveRecord) -> None:
        """The record leaves now. Raises Unavailable, and it must not leave, if it would not fit what stands before it
        when all that was sent is applied: no replica could apply it, or anything behind it."""
        self._foresee(record)
        self._sent.append(record)
        self._recompute()
        if isinstance(record, Release):
            self.held.clear()
        elif isinstance(record, Drop):  # rows go
            self._lingering.pop(record.move, None)

    def _foresee(self, record: MoveRecord) -> None:
        territory = self.territory
        try:
            for each in (*self._sent, record):
                territory = territory.after(each, NOWHERE, 0, 0)
        except (Corrupted, ValueError) as error:
            raise Unavailable(f"partition {self._state.partition}: not now: {error}") from error

    def applied(self) -> bool:
        """The oldest record sent is in the state. Whether that changes what may be read or written: then it is decided
        anew on what waits."""
        before = self.readable, self.writable
        self._sent.popleft()
        self._recompute()
        is_changed = before != (self.readable, self.writable)
        if is_changed:
            self.held.clear()
        return is_changed

    def _recompute(self) -> None:
        self.readable = self.territory.owned
        self.writable = self.territory.writable
        for span in self.guarded.values():
            self.readable, self.writable = self.readable.without(span), self.writable.without(span)
        for record in self._sent:
            if isinstance(record, Freeze):
                self.writable = self.writable.without(record.span)
            elif isinstance(record, Release):
                frozen = self.territory.frozen_by(record.move)
                if frozen is not None:
                    self.readable = self.readable.without(frozen.span)
        self.is_freezing = self.writable != self.readable

    # ── what may be sent: everything that is under way counts as done ─────────────────────────────────────────────────

    def is_pending(self, move: int) -> bool:
        """Whether a record of the move is under way."""
        return any(not isinstance(each, Own) and getattr(each, "move", None) == move for each in self._sent)

    def may_freeze(self, move: int, span: Span) -> bool:
        """The range is owned, takes writes, and has nothing under way."""
        territory = self.territory
        return territory.is_founded and self.writable.covers(span) and not self.is_pending(move)

    def in_force(self, move: int, freeze: Position) -> Frozen:
        """The freeze that was named. Raises Unavailable if it is not in force, or about to end."""
        found = self.territory.frozen_by(move)
        if found is None or found.position != freeze or self.is_pending(move):
            raise Unavailable(f"partition {self._state.partition}: no freeze at {tuple(freeze)} is in force")
        return found


def moved(territory: Territory, row_key: bytes) -> Moved:
    """Why a replica whose territory this is does not answer for a key."""
    released = territory.released_at(int.from_bytes(row_key[1:5], "big"))
    return Moved("" if released is None else released.target, 0)
