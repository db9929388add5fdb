"""Divides one memory budget among all engines of a node.

Memory has three uses. *Write buffers* hold data that is not in a file yet. If they exceed half of the budget, the
largest buffers are flushed. If they exceed three quarters of the budget, writers wait for these flushes. *Indexes and
filters* of files are kept in memory completely, because looking them up in a cache would make reads a third slower. The
remaining memory caches *blocks* of files: write buffers are charged to the cache, and the cache shrinks by the size of
the indexes. The budget is therefore never divided up front, however many engines there are. If only one engine receives
writes, it can use the whole budget, within its own `write_buffer_bytes`.

RocksDB itself would flush the buffer of the engine that receives a write, however small that buffer is. If idle engines
filled the budget, every write would create a file.
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
"""Shares of the budget. If write buffers exceed the first, the largest are flushed; if they exceed the second, writers
wait meanwhile."""
KEPT_SHARE = 7 / 8
"""Share of the allowed write buffers that a round of flushes leaves, so that the next round is not due at once."""
CACHE_SHARE_MIN = 0.25
"""Minimum share of the budget for write buffers and blocks."""
CHECK_S, INDEX_S = 0.05, 5.0
"""Seconds between two checks of all write buffers, and of all indexes. Each check takes about a microsecond per
engine."""
CHECK_SHARE = 1 / 16
"""Share of the budget by which the write buffers may grow before they are checked early."""


class BudgetedEngine(Protocol):
    """An engine that shares the budget."""

    def unflushed_bytes(self) -> int: ...
    def index_bytes(self) -> int: ...
    def flush_to_free(self) -> Future[OSError | None]: ...


class RocksMemory:
    """The block cache and the write-buffer count that all engines of a node share. Methods are called on the event
    loop."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES, now: Callable[[], float] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.cache = Cache(budget_bytes)
        # The manager does not stall writers, because a stall would stop the event loop. Its own flushes, at 7/8 of the
        # budget, matter only on a disk so slow that ours have not ended.
        self.buffers = WriteBufferManager.new_write_buffer_manager_with_cache(budget_bytes, False, self.cache)
        self.flushes = 0
        self._now = now or SystemClock().now
        self._check_at = self._index_at = 0.0
        self._check_beyond = 0.0
        """The size of the write buffers from which on they are checked before the next check is due."""
        self._index_bytes = 0
        self._engines: dict[BudgetedEngine, None] = {}
        self._flushing: set[BudgetedEngine] = set()

    def add(self, engine: BudgetedEngine) -> None:
        """Add an engine to the budget. Its options hold the cache and the write-buffer count."""
        self._engines[engine] = None

    def remove(self, engine: BudgetedEngine) -> None:
        """Remove an engine from the budget, before it closes."""
        self._engines.pop(engine, None)

    def flush_excess(self) -> None:
        """If the write buffers together are too large, flush the largest. Also shrink the cache to leave memory for the
        indexes. Cheap if called again right away."""
        now = self._now()
        if now >= self._index_at:
            self._index_at = now + INDEX_S
            self._shrink_cache_for_indexes()
        used, limit = self.buffers.get_usage(), int(self.budget_bytes * FLUSH_SHARE)
        if used <= limit or (now < self._check_at and used < self._check_beyond):
            return
        self._check_at, self._check_beyond = now + CHECK_S, used + self.budget_bytes * CHECK_SHARE
        # Buffers that are flushed but held by pinned views belong to no engine any more, so no flush would free them.
        sizes = {engine: engine.unflushed_bytes() for engine in self._engines if engine not in self._flushing}
        if (held := sum(sizes.values())) > limit:
            for engine in largest_first(sizes, excess=held - int(limit * KEPT_SHARE)):
                self._flush(engine)

    def is_over(self) -> bool:
        """Return True if the write buffers are so large that writers must wait. Writers wait only while a running flush
        will free memory, because pinned views may hold more than the budget for hours."""
        return bool(self._flushing) and self.buffers.get_usage() >= self.budget_bytes * PAUSE_SHARE

    def statistics(self) -> dict[str, int]:
        """Return the budget in bytes, and the bytes of each kind of memory in it."""
        buffers = self.buffers.get_usage()
        return {
            "memory_budget_bytes": self.budget_bytes,
            "buffer_bytes": buffers,
            "block_bytes": max(0, self.cache.get_usage() - buffers),
            "index_bytes": sum(engine.index_bytes() for engine in self._engines),
            "flushes_for_memory": self.flushes,
        }

    def _flush(self, engine: BudgetedEngine) -> None:
        self.flushes += 1
        self._flushing.add(engine)
        engine.flush_to_free().add_done_callback(lambda _: self._flushing.discard(engine))

    def _shrink_cache_for_indexes(self) -> None:
        found = sum(engine.index_bytes() for engine in self._engines)
        if found != self._index_bytes:
            self._index_bytes = found
            least = int(self.budget_bytes * CACHE_SHARE_MIN)
            self.cache.set_capacity(cache_bytes(self.budget_bytes, index_bytes=found, least=least))
