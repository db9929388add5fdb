"""How many records a token range has, and what they hash to: a sum over them, kept up while they change. Decides only.

A leader counts a range that is about to be frozen, or is being imported, in steps beside its other work. What it reads
is the range as it was when counting began; every later change goes in as a difference, so the order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator

import mmh3

from kvstore.partition.state.effects import bounds
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.rows import token_of_data
from kvstore.partition.state.tokens import Span

ROWS_PER_STEP, BYTES_PER_STEP = 512, 1 << 20
"""Some milliseconds."""
_U64 = (1 << 64) - 1


class RangeDigest:
    """The digest of one range of one state. The state tells it of every change (State.watch)."""

    def __init__(self, engine: Engine, span: Span) -> None:
        self.span = span
        self.count = 0
        self.hash = 0
        self.is_complete = False
        """Whether all records have been counted."""
        self._first, self._end = bounds(span)
        self._rows: Iterator[tuple[bytes, bytes]] = engine.iterate(self._first, self._end)

    def step(self) -> bool:
        """Count some more; True once all are."""
        size = 0
        for _ in range(ROWS_PER_STEP):
            found = next(self._rows, None)
            if found is None:
                self.is_complete = True
                self._rows = iter(())
                return True
            self._add(*found, 1)
            size += len(found[1])
            if size >= BYTES_PER_STEP:
                break
        return False

    def concerned(self, row_keys: list[bytes]) -> list[bytes]:
        """Those of `row_keys` that are in the range, each once."""
        first, end = self._first, self._end
        return list(dict.fromkeys(key for key in row_keys if first <= key < end))

    def change(self, row_keys: list[bytes], before: list[bytes | None], after: list[bytes | None]) -> None:
        """Records have been replaced."""
        for key, old, new in zip(row_keys, before, after, strict=True):
            assert self.span.holds(token_of_data(key)), f"{key!r} is not in {self.span}"
            if old is not None:
                self._add(key, old, -1)
            if new is not None:
                self._add(key, new, 1)

    def _add(self, key: bytes, row: bytes, sign: int) -> None:
        # The length stands between key and row: else bytes could go from one to the other unnoticed.
        one = mmh3.hash64(b"%d|%b%b" % (len(key), key, row), signed=False)[0]
        self.count += sign
        self.hash = (self.hash + sign * one) & _U64
