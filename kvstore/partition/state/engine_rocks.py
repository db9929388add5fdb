"""The engine on disk: RocksDB through rocksdict, which only this file and rocks_memory.py know.

Its own log is off, and everything stands in one column family under key prefixes: with two, a flush of one and a kill
leave one family's rows without the other's.
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
from kvstore.os_errors import CORRUPTION, errno_of_status, is_passing, no_room
from kvstore.partition.state.engine import ROOM_BYTES, ROOM_INODES, Batch, ViewClosed
from kvstore.partition.state.rocks_memory import RocksMemory

BLOOM_BITS_PER_KEY = 10
MEMTABLES_PER_FILE = 16
"""The write buffer is so many sorted tables in memory, which become one file together. A small table stays in the
processor's cache: a put costs half of what it does in one of the whole size."""
MEMTABLE_BYTES_MIN = 64 << 10
MEMTABLES_MAX = 4 * MEMTABLES_PER_FILE
"""Tables that are filled or wait to become files. Only with all of them full would a write wait for the disk."""
BEHIND_MEMTABLES = 5 * MEMTABLES_PER_FILE // 2
BEHIND_FILES = 40
"""So many waiting, or files that wait for compaction, and writers are asked to pause."""
FILES_TO_COMPACT = 8
"""So many together are merged with all rows below. With the library's 4, two million rows were written 3.7 times, not
2.6; each file costs 0.05 µs of a lookup of a key that is not there."""
FILES_SLOWDOWN, FILES_STOP = 64, 256
"""Files that wait for compaction before the engine slows writes down, and stops them: on the event loop, so never."""
LOOK_S = 0.1
"""Between two looks at what others do to the disk."""
READAHEAD_BYTES = 256 << 10
ARENA_BYTES = 16 << 10
"""The step in which a table in memory grows. With the library's eighth of a table, hundreds of engines that are hardly
written to would fill a node's budget with empty steps."""
BLOOM_SHARE = 0.02
"""Of a table in memory, its filter: some 20 bits for each row. It is there as a whole from the first row on."""
BYTES_PER_SYNC = 512 << 10
"""A file goes to the disk bit by bit as it is written: other files' syncs wait behind it."""


RESUME_S = 1.0
"""Between two attempts to write to the directory of an engine that has stopped."""
TRIAL_NAMES = ("000000.dbtmp", "000001.dbtmp")
"""The names of the file of such an attempt. RocksDB removes what a crash leaves of it."""
DELETES_TOGETHER_MAX = 8192
"""Deletes among twice as many rows for which a file is compacted by itself: some milliseconds to step over."""
_FILES = "rocksdb.num-files-at-level0"


class EngineDamaged(OSError):
    """The files hold other bytes than were written."""


class RocksEngine:
    """A directory of RocksDB files. Calls are made on the event loop, except the flush, which has a thread."""

    def __init__(
        self,
        path: str,
        *,
        memory: RocksMemory | None = None,
        write_buffer_bytes: int = 16 << 20,
        on_damage: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open it, within the budget of `memory`; None: one of its own. Raises OSError; EngineDamaged if the files are
        damaged. Damage that is found later is told to `on_damage` as well, in any thread."""
        self._path = path
        self._memory = memory or RocksMemory()
        self._on_damage: Callable[[str], None] = lambda _: None
        self._memtable_bytes = max(MEMTABLE_BYTES_MIN, write_buffer_bytes // MEMTABLES_PER_FILE)
        self._options = _options(self._memtable_bytes, self._memory)
        self._now = SystemClock().now
        self._look_at = 0.0
        """When it is looked again whether it is behind, or after `_bytes_to_look` of writes."""
        self._bytes_to_look = 0
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="engine flush")
        self._views: dict[RocksView, None] = {}
        self.stopped: OSError | None = None
        self.may_resume = False
        self._resume_at = 0.0
        self._open()
        self._on_damage = on_damage
        self._memory.add(self)

    def _open(self) -> None:
        # Without options of its own, the family of an engine that is opened again gets those that stand beside its
        # files, and these do not say all: a cache of blocks for each engine, and no filters.
        options = self._options
        try:
            self._db = Rdict(self._path, options, {"default": options}, access_type=AccessType.read_write())
        except Exception as error:  # rocksdict raises nothing narrower, here and below
            failure = self.stopped = self._failed(error)
            raise failure from error
        self.stopped, self.may_resume = None, False
        write_options = WriteOptions()
        write_options.disable_wal = True  # type: ignore[method-assign,assignment]  # the stub calls it a method
        self._db.set_write_options(write_options)

    def _failed(self, error: Exception) -> OSError:
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

    def batch(self) -> Batch:
        return WriteBatch(raw_mode=True)

    def write(self, batch: Batch) -> None:
        self._bytes_to_look -= batch.size_in_bytes()  # type: ignore[attr-defined]
        try:
            self._db.write(batch)  # type: ignore[arg-type]
        except Exception as error:
            failure = self.stopped = self._failed(error)
            raise failure from error

    def is_behind(self) -> bool:
        """A look costs more than a small write, so there is one per table, and per LOOK_S."""
        now = self._now()
        if self.stopped is not None:
            if now >= self._resume_at and not self.may_resume:
                self._resume_at = now + RESUME_S
                self._threads.submit(self._prepare_to_resume)
            return True
        if self._bytes_to_look > 0 and now < self._look_at:
            return False
        if self._looks_behind():
            return True
        self._bytes_to_look, self._look_at = self._memtable_bytes, now + LOOK_S
        return False

    def _looks_behind(self) -> bool:
        self._memory.look()
        memtables = self._db.property_int_value("rocksdb.num-immutable-mem-table") or 0
        files = int(self._db.property_value(_FILES) or 0)
        is_slow = memtables >= BEHIND_MEMTABLES or files >= BEHIND_FILES
        return is_slow or self._memory.is_over() or bool(self._shortage())

    def unflushed_bytes(self) -> int:
        """Return the size of the tables in memory that are not in a file yet."""
        return _property(self._db, "rocksdb.cur-size-all-mem-tables")

    def index_bytes(self) -> int:
        """Return the size of its files' indexes and filters, which are in memory outside the block cache."""
        return _property(self._db, "rocksdb.estimate-table-readers-mem")

    def flush_to_free(self) -> Future[OSError | None]:
        """Write the tables in memory to a file, in the engine's thread."""
        return self._threads.submit(self._flush)

    def _shortage(self) -> str:
        """Return what the disk has too little of; empty if it has enough of all."""
        disk = os.statvfs(self._path)
        if disk.f_bavail * disk.f_frsize < ROOM_BYTES:
            return f"less than {ROOM_BYTES} bytes are free"
        if disk.f_files and disk.f_favail < ROOM_INODES:  # 0 of 0: this file system has no fixed number of them
            return f"fewer than {ROOM_INODES} inodes are free"
        return ""

    def iterate(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._db.iter(options)
        iterator.seek(begin)
        return self._rows(iterator, iterator.next, (options, end))

    def iterate_back(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        # The library's lower bound is none: rocksdict 0.3.29 sets the upper one.
        options = ReadOptions()
        options.set_iterate_upper_bound(end)
        iterator = self._db.iter(options)
        iterator.seek_to_last()
        return takewhile(lambda row: row[0] >= begin, self._rows(iterator, iterator.prev, (options, end)))

    def _rows(self, iterator: Any, step: Callable[[], None], held: object) -> Iterator[tuple[bytes, bytes]]:
        """The library's own `items` ends at a damaged block as if there were no more rows. `held`: the options and the
        bound, of which the iterator has a bare pointer. Once they are freed it ends wherever their memory says."""
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
        """They hold the files."""
        for view in list(self._views):
            view.close()

    def flush(self, done: Callable[[OSError | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def flushed(future: Future[OSError | None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done, future.result())

        self._threads.submit(self._flush).add_done_callback(flushed)

    def _flush(self) -> OSError | None:
        """Whatever fails is returned: a flush that ended by an error of its thread would be waited for for ever."""
        try:
            if shortage := self._shortage():
                return no_room(f"engine {self._path}: {shortage}")
            self._db.flush()
        except OSError as error:
            return error
        except Exception as error:  # noqa: BLE001
            self.stopped = self._failed(error)
            return self.stopped
        return None

    # docs/protocol.md P46
    def _prepare_to_resume(self) -> None:
        """Find out, in the engine's thread, whether the directory takes writes again. RocksDB recovers by itself from
        most of what it calls NoSpace, but from no other error; then only opening it again helps."""
        with contextlib.suppress(Exception):
            if self._shortage():
                return
            try_file(self._path, TRIAL_NAMES, self._memtable_bytes * MEMTABLES_PER_FILE)
            if self._flush() is None:
                self.stopped = None
                return
            with contextlib.suppress(Exception):  # it is closed already if it could not be opened again
                self._db.cancel_all_background(True)  # to close it would wait a second for its own attempts
            self.may_resume = True

    def resume(self) -> None:
        if self.stopped is None:
            return
        self._end_flushes()
        self._close_views()
        with contextlib.suppress(Exception):  # says again why it has stopped
            self._db.close()
        self._open()

    def clear(self) -> None:
        self._end_flushes()
        self._close_views()
        self._db.close()
        try:
            Rdict.destroy(self._path, self._options)
        except Exception as error:
            raise self._failed(error) from error
        self._open()

    def _end_flushes(self) -> None:
        """Wait for those under way: the library refuses to close beside them."""
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
    """One iterator for each range, made when the view is: an iterator shows what was there then, wherever it is moved
    later, and holds the files for it. The library's snapshots do not do this: iterators over them show later writes."""

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
        """Per iterator: for whom it stands where it does."""
        self._is_closed = False
        views[self] = None

    def cursor(self, begin: bytes, end: bytes) -> RocksCursor:
        if self._is_closed:
            raise ViewClosed
        for number, (first, last, _) in enumerate(self._ranges):
            if first <= begin and end <= last:
                return RocksCursor(self, number, begin, end)
        raise ValueError(f"want a range of the view, got {begin[:8]!r} to {end[:8]!r}")

    def iterator(self, user: RocksCursor, number: int, at: bytes) -> Any:
        """The range's iterator, standing at the first row from `at` on. Raises ViewClosed."""
        if self._is_closed:
            raise ViewClosed
        iterator = self._ranges[number][2]
        if self._users.get(number) is not user:
            iterator.seek(at)
            self._users[number] = user
        return iterator

    def check(self, iterator: Any) -> None:
        """Raise OSError if the iterator has not ended but failed."""
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
    """Shares the view's iterator: another cursor may move it between two calls."""

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
    """Blocks that it reads do not push out those that others read again and again."""
    options = ReadOptions()
    options.set_iterate_upper_bound(end)
    options.fill_cache(False)  # type: ignore[call-arg]  # the stub has forgotten its argument
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
    # One thread writes: the memtable needs no atomic inserts.
    options.set_allow_concurrent_memtable_write(False)
    # Most puts first look up a key that is not there.
    options.set_memtable_prefix_bloom_ratio(BLOOM_SHARE)
    options.set_memtable_whole_key_filtering(True)
    options.set_level_zero_file_num_compaction_trigger(FILES_TO_COMPACT)
    options.set_level_zero_slowdown_writes_trigger(FILES_SLOWDOWN)
    options.set_level_zero_stop_writes_trigger(FILES_STOP)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    # What expires together leaves its deletes together, and each look at what expires next steps over them.
    options.add_compact_on_deletion_collector_factory(2 * DELETES_TOGETHER_MAX, DELETES_TOGETHER_MAX, 0.0)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_bytes_per_sync(BYTES_PER_SYNC)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(4 << 20)
    return options
