"""Limits how much a leader reads to evaluate writes: the records per call, and the bytes per entry. Decides only, over
an engine.

The size of a record is known only after it has been read, and any record may have a megabyte. The leader therefore
reads few records at a time while they are large, and more while they are small. An entry ends once much has been read
for it, because other work on the event loop waits in the meantime.
"""

from __future__ import annotations

from kvstore.partition.state.engine import Engine
from kvstore.partition.state.rows import data_keys_of
from kvstore.ring.hashing import KeyHash

AT_ONCE_FIRST, AT_ONCE_MAX = 32, 128
"""Records read in one call: at first, and at most while records are small."""
ENTRY_READ_MAX = 4 << 20
"""Bytes read for one entry. The last call may exceed it."""
LOOKUP_BYTES = 1 + ENTRY_READ_MAX // 10_000
"""Bytes counted for each operation of a batch: ten thousand operations are as much work as one entry may be."""


class ReadBudget:
    """Limits how much one leader reads to evaluate writes."""

    def __init__(self, engine: Engine, hash: KeyHash) -> None:
        self._engine, self._hash = engine, hash
        self.at_once = AT_ONCE_FIRST
        """Number of records to read in the next call."""
        self.left = ENTRY_READ_MAX
        """Bytes that may still be read for the entry under construction. The caller subtracts what it read."""
        self.size = 0
        """Bytes that the last call read."""

    def multi_get(self, row_keys: list[bytes]) -> list[bytes | None]:
        """Return the rows of at most `at_once` row keys. Raises OSError."""
        rows = self._engine.multi_get(row_keys)
        size = self.size = sum(map(len, filter(None, rows)))
        if size > ENTRY_READ_MAX:
            self.at_once = max(1, len(rows) * ENTRY_READ_MAX // size)
        elif len(rows) >= self.at_once < AT_ONCE_MAX:
            self.at_once = min(2 * self.at_once, AT_ONCE_MAX)
        return rows

    def get(self, row_key: bytes) -> bytes | None:
        """Return a single row. Raises OSError."""
        row = self._engine.get(row_key)
        if row is not None:
            self.left -= len(row)
        return row

    def read(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        """Read the records of `keys`, in order, until the entry's budget is used up, but at least one. Raises
        OSError."""
        found: dict[bytes, bytes | None] = {}
        while len(found) < len(keys) and (self.left > 0 or not found):
            some = keys[len(found) : len(found) + self.at_once]
            found.update(zip(some, self.multi_get(data_keys_of(self._hash, some)), strict=True))
            self.left -= self.size
        return found

    def note_full(self, decided: int) -> None:
        """Record how many of the prefetched operations fitted into the entry."""
        self.at_once = max(1, decided)
