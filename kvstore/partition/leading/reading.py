"""How much a leader reads to decide on writes: how many records at a time, and how many bytes for one entry. Decides
only, over an engine.

How large a record is shows when it has been read, and any may have a megabyte. So few are read at a time while they are
large, more while they are small, and an entry ends when much has been read for it: the others that the event loop
serves wait for that.
"""

from __future__ import annotations

from kvstore.partition.state.engine import Engine
from kvstore.partition.state.rows import data_keys_of

AT_ONCE_FIRST, AT_ONCE_MAX = 32, 128
"""Records read in one call: at first, and as long as they are small."""
ENTRY_READ_MAX = 4 << 20
"""Bytes read for one entry; the last call may go beyond."""
LOOKED_UP_BYTES = 1 + ENTRY_READ_MAX // 10_000
"""Counted for each operation of a batch: ten thousand of them are as much work as an entry may be."""


class Reading:
    """The reads of a leader that decides on writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.at_once = AT_ONCE_FIRST
        """How many records to read in the next call."""
        self.left = ENTRY_READ_MAX
        """Bytes that may still be read for the entry in the making. Whoever reads takes off what was read."""
        self.size = 0
        """Bytes that the last call has read."""

    def multi_get(self, row_keys: list[bytes]) -> list[bytes | None]:
        """Read some rows, not more than `at_once`. Raises OSError."""
        rows = self._engine.multi_get(row_keys)
        size = self.size = sum(map(len, filter(None, rows)))
        if size > ENTRY_READ_MAX:
            self.at_once = max(1, len(rows) * ENTRY_READ_MAX // size)
        elif len(rows) >= self.at_once < AT_ONCE_MAX:
            self.at_once = min(2 * self.at_once, AT_ONCE_MAX)
        return rows

    def get(self, row_key: bytes) -> bytes | None:
        """Read a row that nobody has looked up with others. Raises OSError."""
        row = self._engine.get(row_key)
        if row is not None:
            self.left -= len(row)
        return row

    def look_up(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        """Read the records of `keys`, in order, until it is enough for the entry: of one at least. Raises OSError."""
        found: dict[bytes, bytes | None] = {}
        while len(found) < len(keys) and (self.left > 0 or not found):
            some = keys[len(found) : len(found) + self.at_once]
            found.update(zip(some, self.multi_get(data_keys_of(some)), strict=True))
            self.left -= self.size
        return found

    def note_full(self, decided: int) -> None:
        """Note that the entry was full after so many operations of those whose records were read together."""
        self.at_once = max(1, decided)
