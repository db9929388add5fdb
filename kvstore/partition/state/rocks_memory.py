"""Memory of all engines of a node, within one budget.

Three things take it. *Write buffers*, what is not in a file yet: beyond half of the budget the largest are flushed, and
beyond three quarters writers wait for these flushes. *Indexes and filters* of files, all of them:
reads are a third dearer if they have to be looked up in a cache. *Blocks* of files: what the others leave, since the
cache is charged with the write buffers and made smaller by the indexes. So nothing has to be divided, however many
engines there are. An engine that is written to alone has the whole budget, within its own `write_buffer_bytes`.

The library flushes the buffer of the engine that is written to, however small. Where idle engines fill the budget, that
would be a file for every write.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from rocksdict import Cache, WriteBufferManager

from kvstore.env.clock import SystemClock
from kvstore.partition.state.memory_share import cache_bytes, largest_first

BUDGET_BYTES = 256 << 20
FLUSH_SHARE, PAUSE_SHARE = 0.5, 0.75
"""Of the budget: write buffers beyond the first are flushed, beyond the second writers wait meanwhile."""
KEPT_SHARE = 7 / 8
"""Of what may stay, what a round of flushes leaves: the next is not due at once."""
CACHE_SHARE_MIN = 0.25
"""Of the budget, the least for write buffers and blocks."""
LOOK_S, INDEX_S = 0.05, 5.0
"""Between two looks at all write buffers, and at all indexes: each takes a microsecond or so for each engine."""
LOOK_SHARE = 1 / 16
"""Of the budget: when the write buffers have grown by so much, they are looked at before that."""


class Engine(Protocol):
    """An engine that shares the budget."""

    def unflushed_bytes(self) -> int: ...
    def index_bytes(self) -> int: ...
    def flush_to_free(self) -> Future[OSError | None]: ...


class RocksMemory:
    """A cache of blocks and a count of write buffers that all engines share. Calls are made on the event loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES, now: Callable[[], float] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.cache = Cache(budget_bytes)
        # It makes no writer stall: that would stop the event loop. Its own flushes, at 7/8 of the budget, are for a
        # disk so slow that ours have not ended.
        self.buffers = WriteBufferManager.new_write_buffer_manager_with_cache(budget_bytes, False, self.cache)
        self.flushes = 0
        self._now = now or SystemClock().now
        self._look_at = self._index_at = 0.0
        self._look_beyond = 0.0
        """How large the write buffers must have become for a look before it is due."""
        self._index_bytes = 0
        self._engines: dict[Engine, None] = {}
        self._flushing: set[Engine] = set()

    def add(self, engine: Engine) -> None:
        """Count an engine in. Its options hold the cache and the count of write buffers."""
        self._engines[engine] = None

    def remove(self, engine: Engine) -> None:
        """Count an engine out, before it closes."""
        self._engines.pop(engine, None)

    def look(self) -> None:
        """Flush the largest write buffers if all together are too large, and leave room for the indexes. Cheap if it
        was looked just now."""
        now = self._now()
        if now >= self._index_at:
            self._index_at = now + INDEX_S
            self._make_room_for_indexes()
        used, limit = self.buffers.get_usage(), int(self.budget_bytes * FLUSH_SHARE)
        if used <= limit or (now < self._look_at and used < self._look_beyond):
            return
        self._look_at, self._look_beyond = now + LOOK_S, used + self.budget_bytes * LOOK_SHARE
        # What pinned views hold of buffers that have been flushed is no engine's any more: no flush would free it.
        sizes = {engine: engine.unflushed_bytes() for engine in self._engines if engine not in self._flushing}
        if (held := sum(sizes.values())) > limit:
            for engine in largest_first(sizes, excess=held - int(limit * KEPT_SHARE)):
                self._flush(engine)

    def is_over(self) -> bool:
        """Tell whether all write buffers are so large that writers are to wait. Nobody waits without a flush under way
        that was made to free memory: pinned views may hold more than the budget for hours."""
        return bool(self._flushing) and self.buffers.get_usage() >= self.budget_bytes * PAUSE_SHARE

    def statistics(self) -> dict[str, int]:
        """Return the bytes of each kind that the budget holds, and the budget."""
        buffers = self.buffers.get_usage()
        return {
            "memory_budget_bytes": self.budget_bytes,
            "buffer_bytes": buffers,
            "block_bytes": max(0, self.cache.get_usage() - buffers),
            "index_bytes": sum(engine.index_bytes() for engine in self._engines),
            "flushes_for_memory": self.flushes,
        }

    def _flush(self, engine: Engine) -> None:
        self.flushes += 1
        self._flushing.add(engine)
        engine.flush_to_free().add_done_callback(lambda _: self._flushing.discard(engine))

    def _make_room_for_indexes(self) -> None:
        found = sum(engine.index_bytes() for engine in self._engines)
        if found != self._index_bytes:
            self._index_bytes = found
            least = int(self.budget_bytes * CACHE_SHARE_MIN)
            self.cache.set_capacity(cache_bytes(self.budget_bytes, index_bytes=found, least=least))
