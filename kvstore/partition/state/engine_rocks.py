"""The engine on disk: RocksDB through rocksdict, which only this file and rocks_memory.py use.

RocksDB's own log is off, and all rows are in one column family under key prefixes. With two families, a kill after the
flush of one family would leave its rows without the matching rows of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat, takewhile
from typing import Any

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    DbClosedError,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from kvstore.env.clock import SystemClock
from kvstore.env.files.write_trial import try_file
from kvstore.os_errors import CORRUPTION, errno_of_status, is_passing, no_space
from kvstore.partition.state.engine import RESERVE_BYTES, RESERVE_INODES, EngineBatch, ViewClosed
from kvstore.partition.state.rocks_memory import RocksMemory

BLOOM_BITS_PER_KEY = 10
MEMTABLES_PER_FILE = 16
"""Number of memtables that form the write buffer and become one file. A small memtable stays in the processor's cache:
a put then costs half as much as with one large memtable."""
MEMTABLE_BYTES_MIN = 64 << 10
MEMTABLES_MAX = 4 * MEMTABLES_PER_FILE
"""Maximum number of memtables that are being filled or wait to become files. A write would wait for the disk only if
all of them were full."""
BEHIND_MEMTABLES = 5 * MEMTABLES_PER_FILE // 2
BEHIND_FILES = 40
"""Number of waiting memtables, and of files waiting for compaction, from which on writers are asked to pause."""
FILES_TO_COMPACT = 8
"""Number of files that are merged with all rows below. With RocksDB's default of 4, two million rows were written 3.7
times instead of 2.6 times. Each file adds 0.05 µs to the lookup of an absent key."""
FILES_SLOWDOWN, FILES_STOP = 64, 256
"""Numbers of files waiting for compaction from which on RocksDB slows writes down and stops them. Writes run on the
event loop, so this must never happen."""
CHECK_S = 0.1
"""Seconds between two checks of the disk, which other processes may fill."""
READAHEAD_BYTES = 256 << 10
ARENA_BYTES = 16 << 10
"""The step in which a memtable grows. With RocksDB's default of an eighth of a memtable, hundreds of hardly used
engines would fill a node's memory budget with empty steps."""
BLOOM_SHARE = 0.02
"""Share of a memtable that its Bloom filter takes: some 20 bits per row. The filter is allocated completely with the
first row."""
BYTES_PER_SYNC = 512 << 10
"""Bytes after which RocksDB syncs a file that it is writing, because other files' syncs wait behind a large one."""


RESUME_S = 1.0
"""Seconds between two attempts to write to the directory of a stopped engine."""
TRIAL_NAMES = ("000000.dbtmp", "000001.dbtmp")
"""File names for such an attempt. RocksDB removes files of these names that a crash leaves behind."""
DELETES_PER_BATCH_MAX = 8192
"""Number of deletes among twice as many rows that triggers the compaction of a file. Skipping them takes some
milliseconds."""
_FILES = "rocksdb.num-files-at-level0"


class EngineDamaged(OSError):
    """Raised if the engine's files contain other bytes than were written."""


class RocksEngine:
    """An engine in a directory of RocksDB files. Methods are called on the event loop. Only flushes run in a thread."""

    def __init__(
        self,
        path: str,
        *,
        memory: RocksMemory | None = None,
        write_buffer_bytes: int = 16 << 20,
        on_damage: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the directory. The engine takes its memory from the shared budget `memory`, or from its own budget
        if that is None. `on_damage` is called, from any thread, if damage is found later. Raises OSError, or
        EngineDamaged if the files are damaged."""
        self._path = path
        self._memory = memory or RocksMemory()
        self._on_damage: Callable[[str], None] = lambda _: None
        self._memtable_bytes = max(MEMTABLE_BYTES_MIN, write_buffer_bytes // MEMTABLES_PER_FILE)
        self._options = _options(self._memtable_bytes, self._memory)
        self._now = SystemClock().now
        self._check_at = 0.0
        """When to check again whether the engine is behind, unless `_bytes_to_check` bytes are written before."""
        self._bytes_to_check = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="engine flush")
        self._views: dict[RocksView, None] = {}
        self.stopped: OSError | None = None
        self.may_resume = False
        self._resume_at = 0.0
        self._open()
        self._on_damage = on_damage
        self._memory.add(self)

    def _open(self) -> None:
        # Pass options for the family too. Otherwise a reopened engine's family uses the options stored beside its
        # files, and these are incomplete: each engine would get its own block cache and no filters.
        options = self._options
        try:
            self._db = Rdict(self._path, options, {"default": options}, access_type=AccessType.read_write())
        except Exception as error:  # rocksdict has no narrower class, here and below
            failure = self.stopped = self._failed(error)
            raise failure from error
        self.stopped, self.may_resume = None, False
        write_options = WriteOptions()
        write_options.disable_wal = True  # type: ignore[method-assign,assignment]  # the stub calls it a method
        self._db.set_write_options(write_options)

    def _failed(self, error: Exception) -> OSError:
        if self.stopped is not None and isinstance(error, DbClosedError):
            return self.stopped  # the engine could not be opened again, for this reason
        text, number = f"engine {self._path}: {error}", errno_of_status(str(error))
        if number != CORRUPTION:
            return OSError(number, text)
        self._on_damage(text)
        return EngineDamaged(number, text)

    def get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise self._failed(error) from error
        return value

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        try:
            values: list[bytes | None] = self._db.get(keys)  # type: ignore[arg-type,assignment]
        except Exception as error:
            raise self._failed(error) from error
        return values

    def batch(self) -> EngineBatch:
        return WriteBatch(raw_mode=True)

    def write(self, batch: EngineBatch) -> None:
        self._bytes_to_check -= batch.size_in_bytes()  # type: ignore[attr-defined]
        try:
            self._db.write(batch)  # type: ignore[arg-type]
        except Exception as error:
            failure = self.stopped = self._failed(error)
            raise failure from error

    def is_behind(self) -> bool:
        """A check costs more than a small write, so there is one per memtable of writes, and at most one per CHECK_S
        otherwise."""
        now = self._now()
        if self.stopped is not None:
            if now >= self._resume_at and not self.may_resume:
                self._resume_at = now + RESUME_S
                self._threads.submit(self._prepare_to_resume)
            return True
        if self._bytes_to_check > 0 and now < self._check_at:
            return False
        if self._check_behind():
            return True
        self._bytes_to_check, self._check_at = self._memtable_bytes, now + CHECK_S
        return False

    def _check_behind(self) -> bool:
        self._memory.flush_excess()
        memtables = self._db.property_int_value("rocksdb.num-immutable-mem-table") or 0
        files = int(self._db.property_value(_FILES) or 0)
        is_slow = memtables >= BEHIND_MEMTABLES or files >= BEHIND_FILES
        return is_slow or self._memory.is_over() or bool(self._shortage())

    def unflushed_bytes(self) -> int:
        """Return the number of bytes in memtables that are not in a file yet."""
        return _property(self._db, "rocksdb.cur-size-all-mem-tables")

    def index_bytes(self) -> int:
        """Return the number of bytes of the files' indexes and filters, which are in memory but not in the block
        cache."""
        return _property(self._db, "rocksdb.estimate-table-readers-mem")

    def flush_to_free(self) -> Future[OSError | None]:
        """Write the memtables to a file, in the engine's thread."""
        return self._threads.submit(self._flush)

    def _shortage(self) -> str:
        """Return what the disk is short of; empty if there is enough of everything."""
        disk = os.statvfs(self._path)
        if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
            return f"less than {RESERVE_BYTES} bytes are free"
        if disk.f_files and disk.f_favail < RESERVE_INODES:  # 0 of 0: this file system has no fixed number
            return f"fewer than {RESERVE_INODES} inodes are free"
        return ""

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._iterator(options)
        iterator.seek(begin)
        return self._rows(iterator, iterator.next, (options, end))

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        # Do not set a lower bound: rocksdict 0.3.29 would set the upper bound instead.
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._iterator(options)
        iterator.seek_to_last()
        return takewhile(lambda row: row[0] >= begin, self._rows(iterator, iterator.prev, (options, end)))

    def _iterator(self, options: ReadOptions) -> Any:
        try:
            return self._db.iter(options)
        except Exception as error:
            raise self._failed(error) from error

    def _rows(self, iterator: Any, step: Callable[[], None], held: object) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows. RocksDB's own `items` ends at a damaged block as if there were no more rows. `held` keeps the
        options and the bound alive, to which the iterator has a bare pointer: once they were freed, it would end
        wherever their memory says."""
        valid, key_of, value_of = iterator.valid, iterator.key, iterator.value
        while valid():
            yield key_of(), value_of()
            step()
        try:
            iterator.status()
        except Exception as error:
            raise self._failed(error) from error

    def view(self, ranges: Sequence[tuple[bytes, bytes]]) -> RocksView:
        try:
            return RocksView(self._db, ranges, self._views, self._failed)
        except Exception as error:
            raise self._failed(error) from error

    def _close_views(self) -> None:
        """Close all views, because they hold the files."""
        for view in list(self._views):
            view.close()

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def flushed(future: Future[OSError | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done, future.result())

        self._threads.submit(self._flush).add_done_callback(flushed)

    def _flush(self) -> OSError | None:
        """Flush, and return any error instead of raising it: a caller would wait forever for a flush whose thread
        raised."""
        try:
            if shortage := self._shortage():
                return no_space(f"engine {self._path}: {shortage}")
            self._db.flush()
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001
            self.stopped = self._failed(error)
            return self.stopped
        return None

    # docs/protocol.md P46
    def _prepare_to_resume(self) -> None:
        """Find out, in the engine's thread, whether the directory accepts writes again. RocksDB recovers by itself from
        most errors that it calls NoSpace, but from no other error; after those it must be opened again."""
        with contextlib.suppress(Exception):
            if self._shortage():
                return
            try_file(self._path, TRIAL_NAMES, self._memtable_bytes * MEMTABLES_PER_FILE)
            if self._flush() is None:
                self.stopped = None
                return
            with contextlib.suppress(Exception):  # it is closed already if it could not be opened again
                self._db.cancel_all_background(True)  # closing would otherwise wait a second for RocksDB's own attempts
            self.may_resume = True

    def resume(self) -> None:
        if self.stopped is None:
            return
        self._end_flushes()
        self._close_views()
        with contextlib.suppress(Exception):  # raises the error again that stopped the engine
            self._db.close()
        self._open()

    def clear(self) -> None:
        self._end_flushes()
        self._close_views()
        with contextlib.suppress(Exception):  # the rows that it cannot flush are about to be removed
            self._db.close()
        try:
            Rdict.destroy(self._path, self._options)
        except Exception as error:
            failure = self.stopped = self._failed(error)  # closed: it serves no rows until it is opened again
            raise failure from error
        self._open()

    def _end_flushes(self) -> None:
        """Wait for running flushes, because RocksDB refuses to close during a flush."""
        self._threads.submit(int).result()

    def close(self) -> None:
        self._memory.remove(self)
        self._threads.shutdown(wait=True)
        self._close_views()
        try:
            self._db.close()
        except Exception as error:
            if not is_passing(failure := self._failed(error)):
                raise failure from error


class RocksView:
    """One iterator for each range, created with the view: an iterator shows the rows of its creation, wherever it is
    moved later, and holds the files. RocksDB's snapshots do not help: iterators over them show later writes."""

    def __init__(
        self,
        db: Rdict,
        ranges: Sequence[tuple[bytes, bytes]],
        views: dict[RocksView, None],
        failed: Callable[[Exception], OSError],
    ) -> None:
        self._views, self._failed = views, failed
        self._ranges = [(begin, end, _iterator(db, end)) for begin, end in ranges]
        self._users: dict[int, RocksCursor] = {}
        """Per iterator: the cursor that last moved it."""
        self._is_closed = False
        views[self] = None

    def cursor(self, begin: bytes, end: bytes) -> RocksCursor:
        if self._is_closed:
            raise ViewClosed
        for number, (first, last, _) in enumerate(self._ranges):
            if first <= begin and end <= last:
                return RocksCursor(self, number, begin, end)
        raise ValueError(f"expected a part of one range of the view, got {begin[:8]!r} to {end[:8]!r}")

    def iterator(self, user: RocksCursor, number: int, at: bytes) -> Any:
        """Return the range's iterator, positioned at the first row from `at` on. Raises ViewClosed."""
        if self._is_closed:
            raise ViewClosed
        iterator = self._ranges[number][2]
        if self._users.get(number) is not user:
            iterator.seek(at)
            self._users[number] = user
        return iterator

    def check(self, iterator: Any) -> None:
        """Raise OSError if the iterator has failed rather than ended."""
        try:
            iterator.status()
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        self._is_closed = True
        self._ranges.clear()
        self._users.clear()
        self._views.pop(self, None)


class RocksCursor:
    """A cursor that shares the view's iterator. Another cursor may move the iterator between two calls."""

    def __init__(self, view: RocksView, number: int, begin: bytes, end: bytes) -> None:
        self._view, self._number, self._at, self._end = view, number, begin, end

    def take(self, rows_max: int, bytes_max: int) -> tuple[list[bytes], list[bytes]]:
        iterator = self._view.iterator(self, self._number, self._at)
        key_of, value_of, step = iterator.key, iterator.value, iterator.next
        keys: list[bytes] = []
        values: list[bytes] = []
        add_key, add_value, end, size = keys.append, values.append, self._end, 0
        for _ in repeat(None, rows_max):
            key = key_of()
            if key is None:
                self._view.check(iterator)
                break
            if key >= end:
                break
            value = value_of()
            add_key(key)
            add_value(value)
            step()
            size += len(key) + len(value)
            if size >= bytes_max:
                break
        if keys:
            self._at = keys[-1] + b"\x00"
        return keys, values


def _property(db: Rdict, name: str) -> int:
    try:
        return db.property_int_value(name) or 0
    except DbClosedError:  # it could not be opened again
        return 0


def _iterator(db: Rdict, end: bytes) -> Any:
    """Make an iterator whose blocks do not evict frequently read blocks from the cache."""
    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    options.fill_cache(False)  # type: ignore[call-arg]  # the stub lacks the argument
    options.set_readahead_size(READAHEAD_BYTES)
    return db.iter(options)


def _options(memtable_bytes: int, memory: RocksMemory) -> Options:
    table = BlockBasedOptions()
    table.set_bloom_filter(BLOOM_BITS_PER_KEY, block_based=False)
    table.set_block_cache(memory.cache)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_manager(memory.buffers)
    options.set_write_buffer_size(memtable_bytes)
    options.set_arena_block_size(ARENA_BYTES)
    options.set_min_write_buffer_number_to_merge(MEMTABLES_PER_FILE)
    options.set_max_write_buffer_number(MEMTABLES_MAX)
    # Only one thread writes, so the memtable needs no atomic inserts.
    options.set_allow_concurrent_memtable_write(False)
    # Most puts look up an absent key first.
    options.set_memtable_prefix_bloom_ratio(BLOOM_SHARE)
    options.set_memtable_whole_key_filtering(True)
    options.set_level_zero_file_num_compaction_trigger(FILES_TO_COMPACT)
    options.set_level_zero_slowdown_writes_trigger(FILES_SLOWDOWN)
    options.set_level_zero_stop_writes_trigger(FILES_STOP)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    # Keys that expire together leave their deletes adjacent, and each search for expired keys would step over them.
    options.add_compact_on_deletion_collector_factory(2 * DELETES_PER_BATCH_MAX, DELETES_PER_BATCH_MAX, 0.0)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_bytes_per_sync(BYTES_PER_SYNC)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(4 << 20)
    return options
