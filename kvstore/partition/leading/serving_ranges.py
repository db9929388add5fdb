"""Decides for which tokens a leader may answer reads and accept writes: the tokens that its state owns, except those
that a record in flight gives away. Decides only.

A FREEZE stops writes, and a RELEASE stops everything, from the moment in which the record is sent, because others may
learn that it is acknowledged before this leader does. A record that gives tokens back counts from the moment in which
it is applied. No clock is used (docs/protocol.md M5, M7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from kvstore.errors import Corrupted, Moved, Unavailable
from kvstore.partition.state.move_records import Freeze, MoveRecord, Own, Release
from kvstore.partition.state.ownership import Ownership
from kvstore.partition.state.state import ReplicaState
from kvstore.partition.state.tokens import PART, WHOLE, TokenSpan
from kvstore.wal.ledger_list import BEGINNING as NOWHERE


class ServingRanges:
    """The tokens that one leadership serves."""

    def __init__(self, state: ReplicaState) -> None:
        self._state, self.hash = state, state.hash
        self._sent: deque[MoveRecord] = deque()
        self.blocked_keys: set[bytes] = set()
        """Row keys of batches that wait for a frozen range. Other operations on these records wait behind them."""
        self._recompute()

    @property
    def ownership(self) -> Ownership:
        """The ownership according to the applied records."""
        return self._state.ownership

    # ── what is asked per operation ───────────────────────────────────────────────────────────────────────────────────

    # docs/protocol.md M1
    def may_read(self, row_key: bytes) -> bool:
        """Return True if the leader may answer reads of the row's key."""
        slice_ = self.readable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.readable.holds_row(row_key))

    def may_write(self, row_key: bytes) -> bool:
        """Return True if the leader may accept writes to the row's key."""
        slice_ = self.writable.slices[row_key[1]]
        return slice_ == WHOLE or (slice_ == PART and self.writable.holds_row(row_key))

    def takes_writes(self, row_keys: Collection[bytes]) -> bool:
        """Return True if the leader may accept a write to all of these rows now, and no batch on them waits."""
        is_blocked = self.blocked_keys and not self.blocked_keys.isdisjoint(row_keys)
        return not is_blocked and all(map(self.may_write, row_keys))

    def moved(self, row_key: bytes) -> Moved:
        """Return the error that names the owner of the key."""
        return moved(self.ownership, row_key)

    # ── what is sent and applied ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, record: MoveRecord) -> None:
        """Record that `record` is sent now. Raises Unavailable, in which case the record must not be sent, if it would
        contradict earlier records once all of them are applied: no replica could then apply it or any entry after
        it."""
        self._check_applies(record)
        self._sent.append(record)
        self._recompute()
        if isinstance(record, Release):
            self.blocked_keys.clear()

    def _check_applies(self, record: MoveRecord) -> None:
        ownership = self.ownership
        try:
            for each in (*self._sent, record):
                ownership = ownership.after(each, NOWHERE, 0, 0)
        except (Corrupted, ValueError) as error:
            raise Unavailable(f"partition {self._state.partition}: cannot be logged now: {error}") from error

    def applied(self) -> bool:
        """Record that the state now contains the oldest record in flight. Returns True if that changes which tokens may
        be read or written, or which intents and decisions the state has; the waiting operations must then be evaluated
        again."""
        before = self.readable, self.writable
        record = self._sent.popleft()
        self._recompute()
        is_changed = before != (self.readable, self.writable) or isinstance(record, Release)
        if is_changed:
            self.blocked_keys.clear()
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
        """Return True if a record of the move is in flight."""
        return any(not isinstance(each, Own) and getattr(each, "move", None) == move for each in self._sent)

    def may_freeze(self, move: int, span: TokenSpan) -> bool:
        """Return True if the range is owned, takes writes, and has no record in flight."""
        ownership = self.ownership
        return ownership.is_founded and self.writable.covers(span) and not self.is_pending(move)


def moved(ownership: Ownership, row_key: bytes) -> Moved:
    """Return the error with which a replica with this ownership refuses a key that it does not own."""
    released = ownership.released_at(int.from_bytes(row_key[1:5], "big"))
    return Moved("" if released is None else released.target, 0)
