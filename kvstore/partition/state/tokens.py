"""Sets of tokens, stored as ranges, with a fast check of whether a set contains a key's token. Decides only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from kvstore.ring.hashing import TOKENS
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId

NONE, PART, WHOLE = 0, 1, 2
"""How much of the tokens that share a first byte is in the set."""
_SLICE = TOKENS >> 8
_first_byte_of = itemgetter(1)
"""Takes the first byte of the token from a row key."""


class TokenSpan(NamedTuple):
    """The tokens from `first` to `last`, both included."""

    first: int
    last: int

    def holds(self, token: int) -> bool:
        """Return True if the span contains the token."""
        return self.first <= token <= self.last

    def meets(self, other: TokenSpan) -> bool:
        """Return True if the two spans have a token in common."""
        return self.first <= other.last and other.first <= self.last


class Tokens:
    """A set of tokens. Immutable.

    `slices` has one byte for each value of a token's first byte, so that the common case is a single table lookup:

        slice_ = tokens.slices[row_key[1]]
        held = slice_ == WHOLE or (slice_ == PART and tokens.holds_row(row_key))
    """

    __slots__ = ("_bounds", "is_everything", "slices", "spans")

    def __init__(self, spans: Iterable[TokenSpan]) -> None:
        """Spans may be adjacent but must not overlap."""
        merged: list[TokenSpan] = []
        for span in sorted(spans):
            if merged and span.first <= merged[-1].last:
                raise ValueError(f"expected ranges without common tokens, got {merged[-1]} and {span}")
            if merged and span.first == merged[-1].last + 1:
                merged[-1] = TokenSpan(merged[-1].first, span.last)
            else:
                merged.append(TokenSpan(*span))
        self.spans = tuple(merged)
        self._bounds = [bound for first, last in merged for bound in (first, last + 1)]
        self.is_everything = merged == [TokenSpan(0, TOKENS - 1)]
        slices = bytearray(256)
        for first, last in merged:
            for each in range(first // _SLICE, last // _SLICE + 1):
                is_complete = first <= each * _SLICE and (each + 1) * _SLICE <= last + 1
                slices[each] = WHOLE if is_complete else PART
        self.slices = bytes(slices)

    def holds(self, token: int) -> bool:
        """Return True if the set contains the token."""
        return bisect_right(self._bounds, token) & 1 == 1

    def holds_row(self, row_key: bytes) -> bool:
        """Return True if the set contains the token of a row key (rows.data_key)."""
        return bisect_right(self._bounds, int.from_bytes(row_key[1:5], "big")) & 1 == 1

    def holds_rows(self, row_keys: list[bytes]) -> bool:
        """Return True if the set contains the tokens of all these row keys."""
        slices = self.slices
        if bytes(map(_first_byte_of, row_keys)).translate(slices).count(WHOLE) == len(row_keys):
            return True
        for row_key in row_keys:
            slice_ = slices[row_key[1]]
            if slice_ != WHOLE and not (slice_ == PART and self.holds_row(row_key)):
                return False
        return True

    def covers(self, span: TokenSpan) -> bool:
        """Return True if the set contains all of `span`."""
        return any(first <= span.first and span.last <= last for first, last in self.spans)

    def covers_all(self, others: Tokens) -> bool:
        """Return True if the set contains all of `others`."""
        return self.spans == others.spans or all(map(self.covers, others.spans))

    def meets(self, span: TokenSpan) -> bool:
        """Return True if the set contains at least one token of `span`."""
        return any(span.meets(each) for each in self.spans)

    def with_(self, span: TokenSpan) -> Tokens:
        """Return this set plus `span`. Raises ValueError if the set already contains a token of `span`."""
        return Tokens([*self.spans, span])

    def without(self, span: TokenSpan) -> Tokens:
        """Return this set without the tokens of `span`."""
        left: list[TokenSpan] = []
        for first, last in self.spans:
            if first <= min(last, span.first - 1):
                left.append(TokenSpan(first, min(last, span.first - 1)))
            if max(first, span.last + 1) <= last:
                left.append(TokenSpan(max(first, span.last + 1), last))
        return Tokens(left)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.spans == other.spans

    def __hash__(self) -> int:
        raise TypeError("compared, never a key")

    def __repr__(self) -> str:
        return "Tokens(" + ", ".join(f"{first:08x}-{last:08x}" for first, last in self.spans) + ")"


def spans_of(ring: Ring, partition: PartitionId) -> tuple[TokenSpan, ...]:
    """Return the tokens that the ring gives to the partition."""
    spans: list[TokenSpan] = []
    for start, end, owner in ring.ranges():
        if owner != partition:
            continue
        if start < end:
            spans.append(TokenSpan(start + 1, end))
        else:  # the range wraps around
            spans += [TokenSpan(0, end)] + ([TokenSpan(start + 1, TOKENS - 1)] if start < TOKENS - 1 else [])
    return Tokens(spans).spans


EVERYTHING = Tokens([TokenSpan(0, TOKENS - 1)])
NOTHING = Tokens([])
