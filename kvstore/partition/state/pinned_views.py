"""Keeps the states of a partition as they were at pinned positions. Decides only.

Every replica that applies a MARK keeps its state as it is at the MARK, so all replicas serve the same rows. The replica
drops a kept state at its deadline, when its pin ends, or when the replica's state is replaced (docs/protocol.md, Pinned
reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.errors import NoSuchPin, Overloaded
from kvstore.partition.state import rows
from kvstore.partition.state.decisions import Decision, Decisions
from kvstore.partition.state.engine import Engine, View
from kvstore.partition.state.intents import Intent, IntentEffect
from kvstore.partition.state.internal import Attempt
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.tokens import Tokens
from kvstore.proto import pinned_page
from kvstore.ring.hashing import KeyHash
from kvstore.types import PartitionId, Position, Seq

HELD_MAX = 32
"""Maximum number of views of one replica. Views keep on the disk what is overwritten after the oldest of them. A
notebook that loads one data frame after another has as many views as it loads within their time to live."""


@dataclass(slots=True)
class PinnedView:
    """A partition's state at one position."""

    pin: str
    deadline_ms: int
    position: Position
    seq: Seq
    time_ms: int
    """Record time at the position. Records that expire at or before this time are absent."""
    owned: Tokens
    records: int
    """Number of records, including expired ones."""
    view: View
    hash: KeyHash
    hides_expired: bool
    """True if the view contains expired records, which readers must treat as absent."""
    number: int = 0
    """The number of the pin. It tells a pin from another one that was taken under the same id; 0 in logs of version 2
    and earlier."""
    intents: Sequence[Intent] = ()
    """The intents of transactions that would change a key. The pinned view of each transaction's home knows whether
    the transaction is committed (docs/protocol.md Tx13)."""
    decisions: Decisions = field(default_factory=Decisions)
    committed_rows: dict[bytes, bytes] | None = None
    """The rows that the committed ones of `intents` write, by row key; the flag DELETED says that the key is deleted.
    None until it is known which are committed. Readers see these rows in place of those of the view."""

    @property
    def is_resolved(self) -> bool:
        """True if it is known which of the intents are committed."""
        return not self.intents or self.committed_rows is not None

    def outcome(self, home: bytes, attempt: Attempt, key: bytes, seq: int) -> bool | None:
        """Return True if an intent with this home key is committed at the pin, and False if it is not, by the decisions
        of this view. Returns None if the view does not own the home key."""
        return self.decisions.commits(attempt, key, seq) if self.owned.holds(self.hash.token_of(home)) else None

    def resolve(self, committed: Iterable[Intent]) -> None:
        """Record which of `intents` are committed; the others are aborted or not decided at the pin."""
        found: dict[bytes, bytes] = {}
        for intent in committed:
            asked = intent.record
            if asked.effect == IntentEffect.DELETE:
                row = pinned_page.deleted(intent.seq, self.time_ms)
            else:
                created = asked.created if asked.effect == IntentEffect.PUT and asked.created else intent.seq
                row = rows.encode_record(asked.value, intent.seq, created, self.time_ms, asked.expires_ms)
                self.hides_expired |= 0 < asked.expires_ms <= self.time_ms
            found[rows.data_key(self.hash, intent.key)] = row
        self.committed_rows = found


class PinnedViews:
    """The pinned views of one replica."""

    def __init__(self, partition: PartitionId, engine: Engine, hash: KeyHash) -> None:
        self._partition, self._engine, self._hash = partition, engine, hash
        self.by_pin: dict[str, PinnedView] = {}
        self.passed_ms: Callable[[], int] = lambda: 0
        """The server's time by which views end; 0 if only record time counts (docs/protocol.md, P31)."""
        self.expired = 0
        """Number of views that have reached their deadline."""
        self.refused = 0
        """Number of MARKs that were not kept because there were HELD_MAX views."""

    @property
    def all(self) -> list[PinnedView]:
        """All views, sorted by pin."""
        return [self.by_pin[pin] for pin in sorted(self.by_pin)]

    # docs/protocol.md K1
    def apply(
        self,
        mark: MarkRecord,
        *,
        position: Position,
        seq: Seq,
        time_ms: int,
        owned: Tokens,
        records: int,
        intents: Sequence[Intent] = (),
        decisions: Iterable[Decision] = (),
    ) -> None:
        """Apply a MARK that the state contains. The other arguments describe the state at the MARK."""
        self.expire(time_ms)
        if not mark.takes:
            self._move_deadline(mark)
            return
        self.drop(mark.pin)
        if mark.deadline_ms <= max(time_ms, self.passed_ms()):
            return  # ended long ago: the log is being read again
        if len(self.by_pin) >= HELD_MAX:
            self.refused += 1
            return
        view = self._engine.view((rows.ALL_DATA, rows.ALL_ORDER))
        expired = rows.ALL_EXPIRY[0], rows.expiry_key(time_ms + 1, b"")
        hides_expired = next(self._engine.iterate(*expired), None) is not None
        held = PinnedView(
            mark.pin, mark.deadline_ms, position, seq, time_ms, owned, records, view, self._hash, hides_expired
        )
        held.number, held.intents, held.decisions = mark.number, intents, Decisions(decisions)
        self.by_pin[mark.pin] = held

    def _move_deadline(self, mark: MarkRecord) -> None:
        found = self.by_pin.get(mark.pin)
        if found is None:
            return
        if mark.deadline_ms:
            found.deadline_ms = mark.deadline_ms
        else:
            self.drop(mark.pin)

    def taken(self, pin: str, position: Position) -> PinnedView:
        """Return the view of a MARK that was just applied. Raises Overloaded if there were too many views to keep it,
        and NoSuchPin as `get` does."""
        if pin not in self.by_pin:
            self.check_capacity(pin)
        return self.get(pin, position)

    def check_capacity(self, pin: str) -> None:
        """Raise Overloaded if there are too many views to keep one more for this pin."""
        others = len(self.by_pin) - (pin in self.by_pin)
        if others >= HELD_MAX:
            raise Overloaded(f"partition {self._partition}: {others} of at most {HELD_MAX} pins are in use")

    def numbered(self, pin: str, number: int) -> PinnedView:
        """Return the view of the pin with this number. Raises NoSuchPin if it is not kept here."""
        found = self.by_pin.get(pin)
        if found is None or found.number != number:
            raise NoSuchPin(f"partition {self._partition}: pin {pin!r} with number {number} has ended here")
        return found

    def get(self, pin: str, position: Position) -> PinnedView:
        """Return the view of the pin at `position`. Raises NoSuchPin if it is not kept here."""
        found = self.by_pin.get(pin)
        if found is None or found.position != position:
            raise NoSuchPin(f"partition {self._partition}: pin {pin!r} at {tuple(position)} has ended here")
        return found

    # docs/protocol.md K2
    def expire(self, now_ms: int) -> None:
        """Drop views that have reached their deadline."""
        for pin in [pin for pin, held in self.by_pin.items() if held.deadline_ms <= now_ms]:
            self.drop(pin)
            self.expired += 1

    def drop(self, pin: str) -> None:
        """Drop the view of the pin, if there is one."""
        found = self.by_pin.pop(pin, None)
        if found is not None:
            found.view.close()

    def close(self) -> None:
        """Drop all views, because the state is being replaced or the engine is about to be closed."""
        for pin in sorted(self.by_pin):
            self.drop(pin)
