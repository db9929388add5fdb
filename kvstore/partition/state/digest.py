"""Counts the records of a token range, and hashes them with its intents and decisions. Both are kept current while rows
change. Decides only.

A leader counts a range that is about to be frozen, or is being imported, in steps between other work. It reads the
range as it was when counting began. Later changes are added as differences, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import mmh3

from kvstore.partition.state.effects import moving_bounds
from kvstore.partition.state.engine import Engine
from kvstore.partition.state.rows import ALL_DATA, token_of_data
from kvstore.partition.state.tokens import TokenSpan

ROWS_PER_STEP, BYTES_PER_STEP = 512, 1 << 20
"""Limits of one step, which takes some milliseconds."""
_U64 = (1 << 64) - 1


class RangeDigest:
    """The digest of one token range in one state. The state reports every change to the digest
    (`ReplicaState.watch`)."""

    def __init__(self, engine: Engine, span: TokenSpan) -> None:
        self.span = span
        self.count = 0
        """Number of records."""
        self.hash = 0
        """Hash of the records, intents and decisions."""
        self.is_complete = False
        """True if all rows have been counted."""
        self._first, self._last = span.first.to_bytes(4, "big"), span.last.to_bytes(4, "big")
        every = [engine.iterate(begin, end) for begin, end in moving_bounds(span)]
        self._rows: Iterator[tuple[bytes, bytes]] = chain.from_iterable(every)

    def step(self) -> bool:
        """Count some more rows. Returns True once all rows are counted."""
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
        """Return the row keys that are in the range, without duplicates."""
        first, last = self._first, self._last
        return list(dict.fromkeys(key for key in row_keys if first <= key[1:5] <= last))

    def change(self, row_keys: list[bytes], before: list[bytes | None], after: list[bytes | None]) -> None:
        """Update the digest for changed rows. `before` and `after` are the rows of `row_keys`; None means that the row
        is absent."""
        for key, old, new in zip(row_keys, before, after, strict=True):
            assert self.span.holds(token_of_data(key)), f"{key!r} is not in {self.span}"
            if old is not None:
                self._add(key, old, -1)
            if new is not None:
                self._add(key, new, 1)

    def _add(self, key: bytes, row: bytes, sign: int) -> None:
        # The length separates key and row. Otherwise bytes could move from one to the other without changing the hash.
        one = mmh3.hash64(b"%d|%b%b" % (len(key), key, row), signed=False)[0]
        if key[:1] == ALL_DATA[0]:
            self.count += sign
        self.hash = (self.hash + sign * one) & _U64
