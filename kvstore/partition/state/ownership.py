"""The tokens that a partition owns, and the progress of ranges that move: a function of its log. Decides only.

Every replica has the ownership at the position that it has applied; the leader adds the records that it has sent
(serving_ranges.py). No replica answers for a token that it does not own (docs/protocol.md, Moving a range).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from struct import Struct
from typing import NamedTuple, TypeVar, assert_never

import msgspec

from kvstore.errors import Corrupted, WrittenByNewer
from kvstore.partition.state.marks import MarkRecord
from kvstore.partition.state.move_records import (
    Drop,
    Founded,
    Freeze,
    ImportBegin,
    ImportEnd,
    ImportRows,
    LogVersion,
    MoveRecord,
    Own,
    Release,
    Unfreeze,
)
from kvstore.partition.state.rows import token_bound
from kvstore.partition.state.tokens import EVERYTHING, Tokens, TokenSpan
from kvstore.proto.arrays import ArrayDecoder
from kvstore.types import PartitionId, Position

FORMAT = 1
_head = Struct(">B")


class ImportedRange(NamedTuple):
    """A range that the partition is importing. Its rows are in the engine, but no read sees them."""

    move: int
    attempt: int
    source: PartitionId
    span: TokenSpan
    pin: Position
    cursor: bytes
    """Where copying continues; empty once everything has been copied."""
    tail: Position
    """The position up to which the source's log has been followed."""
    end: ImportEnd | None
    """Set if the import has ended and nothing has arrived since."""
    is_dropping: bool = False
    """The import was abandoned, and its rows are being removed."""
    dropped: bytes = b""
    """Records before this key have been removed."""


class FrozenRange(NamedTuple):
    """A range that the partition owns but in which it accepts no writes at the moment."""

    move: int
    target: PartitionId
    span: TokenSpan
    position: Position


class ReleasedRange(NamedTuple):
    """A range that the partition used to own. Its rows are still in the engine, but no read sees them."""

    move: int
    target: PartitionId
    span: TokenSpan
    freeze: Position
    position: Position
    seq: int
    """The partition's sequence when the range was released; `time_ms` is its record time then."""
    time_ms: int
    dropped: bytes = b""
    """Records before this key have been removed. Without this bound, each DROP would step over the remains of all
    earlier ones."""


_Part = TypeVar("_Part", ImportedRange, FrozenRange, ReleasedRange)


def _find(parts: Iterable[_Part], move: int) -> _Part | None:
    return next((each for each in parts if each.move == move), None)


# docs/protocol.md M2
@dataclass(frozen=True)
class Ownership:
    """The tokens that a partition owns, and its ranges that are moving, at one position of its log."""

    owned: Tokens = EVERYTHING
    """The tokens that the partition owns. If its log does not record what it owns, the partition is older than moves
    and owns what the ring gives it."""
    is_founded: bool = False
    imports: tuple[ImportedRange, ...] = ()
    frozen: tuple[FrozenRange, ...] = ()
    released: tuple[ReleasedRange, ...] = ()
    newest: int = 0
    """Id of the latest planned move that brought a range to this partition. A ring that does not contain this move is
    too old to route by."""

    @cached_property
    def writable(self) -> Tokens:
        """The tokens that the partition owns and that are not frozen."""
        tokens = self.owned
        for each in self.frozen:
            tokens = tokens.without(each.span)
        return tokens

    @property
    def has_foreign_rows(self) -> bool:
        """True if the engine contains rows that the partition does not own."""
        return bool(self.imports or self.released)

    def import_of(self, move: int) -> ImportedRange | None:
        """Return the range that this move imports, or None."""
        return _find(self.imports, move)

    def frozen_by(self, move: int) -> FrozenRange | None:
        """Return the range that this move has frozen, or None."""
        return _find(self.frozen, move)

    def released_by(self, move: int) -> ReleasedRange | None:
        """Return the range that this move has released, or None."""
        return _find(self.released, move)

    def released_at(self, token: int) -> ReleasedRange | None:
        """Return the release that gave the token away. Returns None if the token was not given away, or if its rows
        have been dropped."""
        return next((each for each in self.released if each.span.holds(token)), None)

    def droppable(self, move: int) -> tuple[bytes, bytes] | None:
        """Return the range [first, second) of row keys that the DROP records of this move still have to remove."""
        part = self.released_by(move) or self.import_of(move)
        if part is None:
            return None
        return max(part.dropped, token_bound(part.span.first)), token_bound(part.span.last + 1)

    # ── what records change ───────────────────────────────────────────────────────────────────────────────────────────

    def after(self, record: MoveRecord, position: Position, seq: int, time_ms: int) -> Ownership:
        """Return the ownership after the record at `position`, which was written at sequence `seq` and record time
        `time_ms`. Raises Corrupted for a record that no leader may write; serving_ranges.py has the rules for
        leaders."""
        match record:
            case Founded(spans):
                self._want(not self.is_founded, record)
                return replace(self, owned=Tokens(spans), is_founded=True)
            case ImportBegin():
                return self._begin(record)
            case ImportRows():
                return self._with_import(record.move, record, cursor=record.cursor, tail=record.tail, end=None)
            case ImportEnd():
                return self._with_import(record.move, record, end=record)
            case Own():
                return self._own(record)
            case Freeze(move, target, span):
                self._want(self.writable.covers(span) and self.frozen_by(move) is None, record)
                return replace(self, frozen=(*self.frozen, FrozenRange(move, target, span, position)))
            case Unfreeze(move):
                self._want(self.frozen_by(move) is not None, record)
                return replace(self, frozen=_without(self.frozen, move))
            case Release():
                return self._release(record, position, seq, time_ms)
            case Drop():
                return self._drop(record)
            case MarkRecord() | LogVersion():
                return self
        assert_never(record)

    def _want(self, is_right: bool, record: MoveRecord) -> None:
        if not is_right:
            raise Corrupted(f"{record!r:.200} contradicts the records before it: {self}")

    def _begin(self, record: ImportBegin) -> Ownership:
        move, attempt, source, span, pin = record
        others = _without(self.imports, move)
        foreign = [each.span for each in others] + [each.span for each in self.released]
        self._want(not self.owned.meets(span) and not any(span.meets(each) for each in foreign), record)
        begun = ImportedRange(move, attempt, source, span, pin, b"d", pin, None)
        return replace(self, imports=(*others, begun))

    def _with_import(
        self,
        move: int,
        record: MoveRecord,
        *,
        end: ImportEnd | None,
        cursor: bytes | None = None,
        tail: Position | None = None,
    ) -> Ownership:
        found = self.import_of(move)
        self._want(found is not None and not found.is_dropping, record)
        assert found is not None
        cursor = found.cursor if cursor is None else cursor
        changed = found._replace(cursor=cursor, tail=tail or found.tail, end=end)
        return replace(self, imports=(*_without(self.imports, move), changed))

    def _own(self, record: Own) -> Ownership:
        found = self.import_of(record.move)
        self._want(found is not None and found.end is not None and found.end.freeze == record.freeze, record)
        assert found is not None
        owned, newest = self.owned.with_(found.span), max(self.newest, record.move)
        return replace(self, owned=owned, imports=_without(self.imports, record.move), newest=newest)

    def _release(self, record: Release, position: Position, seq: int, time_ms: int) -> Ownership:
        found = self.frozen_by(record.move)
        self._want(found is not None and found.position == record.freeze, record)
        assert found is not None
        move, target, span, freeze = found
        released = ReleasedRange(move, target, span, freeze, position, seq, time_ms)
        owned, frozen = self.owned.without(span), _without(self.frozen, move)
        return replace(self, owned=owned, frozen=frozen, released=(*self.released, released))

    def _drop(self, record: Drop) -> Ownership:
        move = record.move
        self._want(self.droppable(move) is not None, record)
        if not record.until:
            return replace(self, imports=_without(self.imports, move), released=_without(self.released, move))
        until = record.until
        return replace(
            self,
            imports=tuple(
                each._replace(is_dropping=True, end=None, dropped=until) if each.move == move else each
                for each in self.imports
            ),
            released=tuple(each._replace(dropped=until) if each.move == move else each for each in self.released),
        )

    # ── its row ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def encode(self) -> bytes:
        """Encode the ownership as an engine row. An ownership that was never founded has no row."""
        row = _Row(self.owned.spans, self.imports, self.frozen, self.released, self.newest)
        return _head.pack(FORMAT) + msgspec.msgpack.encode(row)

    @staticmethod
    def decode(row: bytes) -> Ownership:
        """Decode the engine row. Unknown fields are ignored, and lost with the next change. Raises WrittenByNewer for
        an unknown format, and Corrupted for a malformed row."""
        if row[0] != FORMAT:
            raise WrittenByNewer(f"expected the ownership row in format {FORMAT}, got format {row[0]}")
        try:
            owned, imports, frozen, released, newest = _decoder.decode(row[1:])
        except msgspec.DecodeError as error:
            raise Corrupted(f"cannot read the ownership row {row[:32].hex()}: {error}") from error
        return Ownership(Tokens(owned), True, imports, frozen, released, newest)


class _Row(NamedTuple):
    owned: tuple[TokenSpan, ...]
    imports: tuple[ImportedRange, ...]
    frozen: tuple[FrozenRange, ...]
    released: tuple[ReleasedRange, ...]
    newest: int = 0


_decoder = ArrayDecoder(_Row)


def _without(parts: tuple[_Part, ...], move: int) -> tuple[_Part, ...]:
    return tuple(each for each in parts if each.move != move)
