"""An engine in memory, for tests and the simulation. It marks explicitly what has been flushed. A simulated crash
reverts to that mark, so that, as on disk, all batches up to some point survive and none after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from sortedcontainers import SortedDict

from kvstore.partition.state.engine import EngineBatch, ViewClosed

_Undo = list[tuple[bytes, bytes | None]]


class MemoryBatch:
    """A batch: operations in order."""

    def __init__(self) -> None:
        self.operations: list[tuple[bytes, bytes | None]] = []
        """(key, value) puts; (key, None) deletes."""

    def put(self, key: bytes, value: bytes) -> None:
        self.operations.append((key, value))

    def delete(self, key: bytes) -> None:
        self.operations.append((key, None))


class MemoryView:
    """A view: a copy of all rows."""

    def __init__(self, rows: SortedDict[bytes, bytes]) -> None:
        self._rows: SortedDict[bytes, bytes] | None = rows.copy()

    @property
    def rows(self) -> SortedDict[bytes, bytes]:
        if self._rows is None:
            raise ViewClosed
        return self._rows

    def cursor(self, begin: bytes, end: bytes) -> MemoryCursor:
        return MemoryCursor(self, begin, end)

    def close(self) -> None:
        self._rows = None


class MemoryCursor:
    """A cursor over the keys of a view."""

    def __init__(self, view: MemoryView, begin: bytes, end: bytes) -> None:
        self._view = view
        self._keys: Iterator[bytes] = view.rows.irange(begin, end, inclusive=(True, False))

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        rows, keys, size = self._view.rows, list[bytes](), 0
        for key in islice(self._keys, rows_max):
            keys.append(key)
            size += len(key) + len(rows[key])
            if size >= bytes_max:
                break
        return keys, [rows[key] for key in keys]


class MemoryEngine:
    """An engine in memory. A flush takes `flush_s` seconds. Writes during a flush are not part of it."""

    def __init__(self, flush_s: float = 0.0) -> None:
        self._rows: SortedDict[bytes, bytes] = SortedDict()
        self._unflushed: list[_Undo] = []
        """The batches since the mark, each as the changes that undo it."""
        self._written = 0
        self._flushed = 0
        self._flush_s = flush_s
        self._life = 0
        """Number of crashes. A flush that was running during a crash does not count."""
        self._open = True
        self._views: list[MemoryView] = []
        self.behind = False
        """The result of `is_behind`."""
        self.stopped: OSError | None = None
        self.may_resume = False

    def is_behind(self) -> bool:
        return self.behind or self.stopped is not None

    def resume(self) -> None:
        if self.stopped is not None:
            self.crash()

    def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        return list(map(self._rows.get, keys))

    def batch(self) -> MemoryBatch:
        return MemoryBatch()

    def write(self, batch: EngineBatch) -> None:
        assert isinstance(batch, MemoryBatch)
        assert self._open, "written after close"
        if self.stopped is not None:
            raise self.stopped
        undo: _Undo = []
        for key, value in batch.operations:
            undo.append((key, self._rows.get(key)))
            self._set(key, value)
        batch.operations = []
        self._unflushed.append(undo)
        self._written += 1

    def _set(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = value

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, self._rows[key]) for key in self._rows.irange(begin, end, inclusive=(True, False))])

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys = self._rows.irange(begin, end, inclusive=(True, False), reverse=True)
        return iter([(key, self._rows[key]) for key in keys])

    def view(self, ranges: Sequence[tuple[bytes, bytes]]) -> MemoryView:
        made = MemoryView(self._rows)
        self._views.append(made)
        return made

    def _close_views(self) -> None:
        while self._views:
            self._views.pop().close()

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        loop = asyncio.get_running_loop()
        if self.stopped is not None:
            loop.call_soon(done, self.stopped)
            return
        loop.call_later(self._flush_s, self._mark, self._written, self._life, done)

    def _mark(self, written: int, life: int, done: Callable[[OSError | None], None]) -> None:
        if not self._open or life != self._life:
            return
        del self._unflushed[: written - self._flushed]
        self._flushed = max(self._flushed, written)
        done(None)

    def clear(self) -> None:
        self._close_views()
        self.stopped, self.may_resume = None, False
        self._rows.clear()
        self._unflushed.clear()
        self._flushed = self._written

    def close(self) -> None:
        assert self._open, "an engine is closed once: RocksDB refuses the second time"
        self._close_views()
        self._open = False

    def crash(self, keep: int = 0) -> None:
        """Revert to the last flush, plus the next `keep` batches. Flushes in progress count as not done. Afterwards the
        engine can be used again, as if it had been reopened."""
        self._close_views()
        for undo in reversed(self._unflushed[keep:]):
            for key, old in reversed(undo):
                self._set(key, old)
        self._unflushed.clear()
        self._flushed = self._written
        self._life += 1
        self._open = True
        self.stopped, self.may_resume = None, False
