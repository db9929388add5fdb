"""A simulated disk: files, names and what a crash leaves of them.

A write is certain to survive a power cut once a later sync has completed, and a name once its directory has been
synced. Everything else may be kept, dropped, or torn at 512 bytes. A killed process loses nothing: the page cache
survives.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from errno import EBADF, EIO, ENOSPC, ENOTEMPTY
from random import Random
from typing import TYPE_CHECKING

from kvstore.env.ports import FILES_UNLIMITED
from kvstore.env.syncs import NotWritten
from kvstore.os_errors import SyncFailed
from tests.sim.judges.probes import declare, probe
from tests.sim.world.inode import FATES, Fate, Inode, Resize, Write
from tests.sim.world.loop import current_node
from tests.sim.world.names import Create, Mkdir, NameChange, Names, Remove, Rename, parent

if TYPE_CHECKING:
    from tests.sim.trace import Trace
    from tests.sim.world.oplog import OpLog

declare(
    "disk.sync_failed",
    "disk.power_cut_with_unsynced_writes",
    "disk.full",
    "disk.name_lost",
    "disk.no_inodes",
    "disk.refused",
)

PROBE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """Durations in seconds. Values are drawn uniformly from the ranges."""

    sync_s: tuple[float, float] = (0.0001, 0.002)
    slow_chance: float = 0.01
    slow_s: tuple[float, float] = (0.01, 0.2)
    capacity_bytes: int = 1 << 40


@dataclass(frozen=True, slots=True)
class Refusal:
    """An errno with which operations on some paths fail."""

    errno: int
    operations: frozenset[str]
    part: str = ""
    """A part of the path; all paths if empty."""

    def concerns(self, path: str, operation: str) -> bool:
        return operation in self.operations and self.part in path


@dataclass(frozen=True, slots=True)
class _Sync:
    at: float
    mark: int
    """The synced changes; -1: none, the sync only reports after the syncs before it."""
    error: OSError | None
    done: Callable[[OSError | None], None]
    path: str


class SimFile:
    """An open file of one process."""

    __slots__ = ("_disk", "_inode", "_is_open", "_path")

    def __init__(self, disk: SimDisk, inode: Inode, path: str) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._is_open = True

    def pwrite(self, offset: int, data: bytes) -> None:
        self._check("pwrite")
        self._disk.reserve(self._inode, offset + len(data))
        self._disk.change(self._inode, Write(offset, bytes(data)))

    def read(self, offset: int, size: int) -> bytes:
        self._check("read")
        self._disk.check_readable(self._inode, offset, size)
        return self._inode.cache.read(offset, size)

    def size(self) -> int:
        self._check()
        return self._inode.cache.size

    def allocate(self, size: int) -> None:
        self._check("allocate")
        if size > self._inode.cache.size:
            self._resize(size)

    def truncate(self, size: int) -> None:
        self._check("truncate")
        self._resize(size)

    def _resize(self, size: int) -> None:
        self._disk.reserve(self._inode, size)
        self._disk.change(self._inode, Resize(size))

    def submit_sync(self, done: Callable[[OSError | None], None]) -> None:
        self._check("submit_sync")
        self._disk.submit_sync(self._inode, done, self._path)

    def submit_write(
        self, offset: int, data: bytes, done: Callable[[OSError | None], None], *, is_synced: bool = True
    ) -> None:
        try:
            self.pwrite(offset, data)
        except OSError as error:
            asyncio.get_running_loop().call_soon(done, NotWritten(*error.args))
            return
        if is_synced:
            self.submit_sync(done)
        else:
            self._disk.submit_report(self._inode, done, self._path)

    def sync(self) -> None:
        self._check()
        error = self._disk.next_sync_error(self._path)
        self._disk.end_sync(self._inode, self._inode.mark, error)
        if error is not None:
            raise SyncFailed(*error.args)

    def close(self) -> None:
        self._is_open = False

    def _check(self, operation: str = "") -> None:
        check_alive()
        if not self._is_open:
            raise OSError(EBADF, f"{self._path} is closed")
        self._disk.check_working(self._path, operation)


class SimDisk:
    """The Disk port of one node. It outlives the node's processes."""

    def __init__(
        self, random: Random, config: DiskConfig | None = None, *, name: str = "", trace: Trace | None = None
    ) -> None:
        self.config = config or DiskConfig()
        self.name = name
        self.names = Names()
        self.oplog: OpLog | None = None
        self._random = random
        self._trace = trace
        self._inodes = 0
        self._syncs: dict[int, deque[_Sync]] = {}
        self._syncs_to_failure = 0
        self._hung: list[str] = []
        self._parked: list[tuple[Inode, deque[_Sync], Context]] = []
        """Syncs that are due while the disk hangs."""
        self._unreadable: list[tuple[Inode, range]] = []
        self._dead: list[str] = []
        self.has_inodes = True
        """If False, no file can be created, whatever space is free."""
        self.refusals: list[Refusal] = []
        """Failing operations, until they are removed."""

    # The port

    def open(self, path: str, *, create: bool = False) -> SimFile:
        check_alive()
        self.check_working(path, "open")
        inode = self.names.now.files.get(path)
        if inode is None:
            if not create:
                raise FileNotFoundError(path)
            _check_path(path)
            self.check_working(path, "create")
            self._need_dir(parent(path))
            self._need_inode(path)
            self._inodes += 1
            inode = Inode(self._inodes)
            self.change_names(Create(path, inode))
        return SimFile(self, inode, path)

    def exists(self, path: str) -> bool:
        check_alive()
        return not self.is_dead(path) and (path in self.names.now.files or path in self.names.now.dirs)

    def list(self, path: str) -> list[str]:
        check_alive()
        self.check_working(path)
        return self.names.now.below(path)

    def mkdir(self, path: str) -> None:
        check_alive()
        self.check_working(path, "mkdir" if path not in self.names.now.dirs else "")
        if path:
            _check_path(path)
        parts = path.split("/") if path else []
        for count in range(1, len(parts) + 1):
            each = "/".join(parts[:count])
            if each in self.names.now.files:
                raise FileExistsError(each)
            if each not in self.names.now.dirs:
                self.change_names(Mkdir(each))

    def remove(self, path: str) -> None:
        check_alive()
        self.check_working(path)
        if not self.exists(path):
            raise FileNotFoundError(path)
        if self.names.now.below(path):
            raise OSError(ENOTEMPTY, path)
        self.change_names(Remove(path))

    def rename(self, old: str, new: str) -> None:
        check_alive()
        self.check_working(old, "rename")
        _check_path(new)
        if not self.exists(old):
            raise FileNotFoundError(old)
        self._need_dir(parent(new))
        self.change_names(Rename(old, new))

    def sync_dir(self, path: str) -> None:
        check_alive()
        try:
            self.check_working(path, "sync_dir")
        except OSError as error:
            raise SyncFailed(*error.args) from error
        self._need_dir(path)
        self.names.sync_dir(path)
        self._saw("sync_dir", path)
        if self.oplog is not None:
            self.oplog.synced_dir(path)

    def free_bytes(self, path: str = "") -> int:
        self.check_working(path)
        return self._left_bytes()

    def free_files(self, path: str = "") -> int:
        self.check_working(path)
        return FILES_UNLIMITED if self.has_inodes else 0

    def submit_probe(self, path: str, done: Callable[[OSError | None], None]) -> None:
        check_alive()
        asyncio.get_running_loop().call_later(PROBE_S, lambda: done(self._probe_error(path)))

    def _probe_error(self, path: str) -> OSError | None:
        try:
            for operation in ("create", "pwrite", "sync"):
                self.check_working(f"{path}/write-probe", operation)
            self._need_inode(path)
        except OSError as error:
            return error
        return None if self._left_bytes() else OSError(ENOSPC, "no space is left on its disk")

    def _need_inode(self, path: str) -> None:
        if not self.has_inodes:
            probe("disk.no_inodes")
            raise OSError(ENOSPC, f"no inodes are free for {path}")

    def real_path(self, path: str) -> str:
        raise NotImplementedError(f"{path} is simulated: it has no path in the machine's file system")

    # Faults

    def kill(self) -> None:
        """End the processes but not the machine: nothing is lost, but no further sync is reported."""
        for queue in self._syncs.values():
            queue.clear()
        self._syncs.clear()

    def power_cut(self, fate: Fate | None = None, random: Random | None = None) -> None:
        """Cut the machine's power: decide what happens to unsynced data, at random unless `fate` decides."""
        self.kill()
        random = random or self._random
        keep = fate.keep if fate else random.choice((0, 0.5, 0.9, 1))
        if self.names.power_cut(keep, random):
            probe("disk.name_lost")
        inodes = {inode.number: inode for inode in self.names.now.files.values()}
        for number in sorted(inodes):
            if inodes[number].pending:
                probe("disk.power_cut_with_unsynced_writes")
            inodes[number].power_cut(fate or random.choice(FATES), random)

    def fail_sync(self, nth: int = 1) -> None:
        """Let the `nth` sync from now fail with EIO; its pages count as clean afterwards."""
        self._syncs_to_failure = nth

    def set_capacity(self, size: int) -> None:
        """Let writes beyond `size` bytes in total fail with ENOSPC."""
        self.config = replace(self.config, capacity_bytes=size)

    def slow_syncs(self, seconds: tuple[float, float]) -> None:
        """Let every sync from now on take a time from this range."""
        self.config = replace(self.config, sync_s=seconds, slow_chance=0.0)

    def flip_bit(self, path: str, bit: int | None = None) -> int:
        """Flip a bit of a file, on the platter and in the cache. The bit is random unless given. Returns the bit."""
        inode = self.names.now.files[path]
        where = self._random.randrange(8 * inode.cache.size) if bit is None else bit
        for content in (inode.cache, inode.platter):
            if content.size > where // 8:
                content.write(where // 8, bytes([content.read(where // 8, 1)[0] ^ 1 << where % 8]))
        self._saw("flip_bit", path, where)
        return where

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        """Put `data` on the platter and in the cache without notice to any process: a stale or misdirected block."""
        inode = self.names.now.files[path]
        for content in (inode.cache, inode.platter):
            content.write(offset, data)
        self._saw("overwrite", path, offset, len(data))

    def fail_reads(self, path: str, where: range | None = None) -> None:
        """Let reads that touch the bytes `where` (all by default) fail with EIO."""
        self._unreadable.append((self.names.now.files[path], where or range(1 << 62)))

    def die(self, path: str) -> None:
        """Break the disk that is mounted at the directory `path`: nothing below it can be read or written."""
        self._saw("die", path)
        self._dead.append(path)

    def exchange(self, path: str) -> None:
        """Mount a new, empty disk at the directory `path`."""
        self._saw("exchange", path)
        self._dead = [each for each in self._dead if each != path]
        below = [each for each in (*self.names.now.files, *self.names.now.dirs) if each.startswith(f"{path}/")]
        for each in sorted(below, reverse=True):
            self.names.change(Remove(each))
            self.names.sync_dir(parent(each))

    @property
    def has_dead(self) -> bool:
        """True if the disk of some directory is broken and was not replaced yet."""
        return bool(self._dead)

    def is_dead(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{each}/") for each in self._dead)

    def check_working(self, path: str, operation: str = "") -> None:
        """Raise EIO if the directory's disk is broken, or the errno that refuses the operation."""
        if self._dead and self.is_dead(path):
            raise OSError(EIO, f"{path}: the disk is broken")
        for each in self.refusals:
            if each.concerns(path, operation):
                probe("disk.refused")
                raise OSError(each.errno, os.strerror(each.errno))

    def hang(self, path: str) -> None:
        """Let no sync of files below `path` end until `thaw`. An empty path is the whole disk."""
        self._saw("hang", path)
        self._hung.append(path)

    def thaw(self) -> None:
        """Let all delayed syncs end."""
        self._saw("thaw")
        self._hung.clear()
        parked, self._parked = self._parked, []
        for inode, queue, context in parked:
            asyncio.get_running_loop().call_soon(self._end_first, inode, queue, context=context)

    def is_hung(self, path: str) -> bool:
        return any(not each or f"{path}/".startswith(f"{each}/") for each in self._hung)

    def mend(self) -> None:
        """Undo all failing or hanging reads and syncs, and make space and inodes available."""
        self.has_inodes = True
        if self._hung:
            self.thaw()
        self._unreadable.clear()
        self.refusals.clear()
        self._syncs_to_failure = 0
        self.config = replace(self.config, capacity_bytes=1 << 40)

    def copy(self, random: Random) -> SimDisk:
        """Return a copy of the disk without its faults."""
        disk = SimDisk(random, self.config, name=self.name)
        disk._inodes = max([self._inodes, *self.names.inodes()])
        disk.names = self.names.copy({number: inode.copy() for number, inode in self.names.inodes().items()})
        return disk

    # Used by files and op logs

    def change(self, inode: Inode, change: Write | Resize) -> None:
        inode.change(change)
        if isinstance(change, Write):
            self._saw("write", inode.number, change.offset, len(change.data), zlib.crc32(change.data))
        if self.oplog is not None:
            self.oplog.changed(inode, change)

    def change_names(self, change: NameChange) -> None:
        self.names.change(change)
        self._saw(type(change).__name__.lower(), *sorted(change.dirs))
        if self.oplog is not None:
            self.oplog.changed_names(change)

    def submit_sync(self, inode: Inode, done: Callable[[OSError | None], None], path: str = "") -> None:
        loop = asyncio.get_running_loop()
        queue = self._syncs.setdefault(inode.number, deque())
        at = loop.time() + self._sync_seconds()
        if queue:
            at = max(at, queue[-1].at)
        queue.append(_Sync(at, inode.mark, self.next_sync_error(path), done, path))
        loop.call_at(at, self._end_first, inode, queue)

    def submit_report(self, inode: Inode, done: Callable[[OSError | None], None], path: str = "") -> None:
        """Report an unsynced write, after the syncs before it."""
        loop = asyncio.get_running_loop()
        queue = self._syncs.setdefault(inode.number, deque())
        at = max([loop.time() + self.config.sync_s[0], *(sync.at for sync in queue)])
        queue.append(_Sync(at, -1, None, done, path))
        loop.call_at(at, self._end_first, inode, queue)

    def _end_first(self, inode: Inode, queue: deque[_Sync]) -> None:
        """End the oldest sync of a file: in order, even on a loop that reorders timers of one instant."""
        if queue and self._hung and self.is_hung(queue[0].path):
            self._parked.append((inode, queue, copy_context()))
        elif queue:
            sync = queue.popleft()
            error = OSError(EIO, f"{sync.path}: the disk is broken") if self.is_dead(sync.path) else sync.error
            if sync.mark >= 0:
                self.end_sync(inode, sync.mark, error)
            sync.done(error)

    def next_sync_error(self, path: str = "") -> OSError | None:
        """Return the error with which the next sync will end, or None."""
        self._syncs_to_failure -= 1
        for each in self.refusals:
            if each.concerns(path, "sync"):
                return OSError(each.errno, os.strerror(each.errno))
        return OSError(EIO, "the sync failed") if self._syncs_to_failure == 0 else None

    def end_sync(self, inode: Inode, mark: int, error: OSError | None) -> None:
        self._saw("sync", inode.number, mark, "failed" if error else "done")
        if error is not None:
            probe("disk.sync_failed")
            inode.lose(mark, self._random)
            return
        inode.flush(mark)
        if self.oplog is not None:
            self.oplog.synced(inode, mark)

    def reserve(self, inode: Inode, size: int) -> None:
        """Raise ENOSPC unless `inode` may grow to `size`."""
        growth = size - inode.cache.size
        if growth > 0 and self.config.capacity_bytes < 1 << 40 and growth > self._left_bytes():
            probe("disk.full")
            raise OSError(ENOSPC, "no space left on the simulated disk")

    def check_readable(self, inode: Inode, offset: int, size: int) -> None:
        for damaged, where in self._unreadable:
            if damaged is inode and offset < where.stop and where.start < offset + size:
                raise OSError(EIO, "these bytes cannot be read")

    def _left_bytes(self) -> int:
        return max(0, self.config.capacity_bytes - self._used_bytes())

    def _used_bytes(self) -> int:
        return sum(inode.cache.size for inode in self.names.now.files.values())

    def _sync_seconds(self) -> float:
        config = self.config
        slow = self._random.random() < config.slow_chance
        return self._random.uniform(*(config.slow_s if slow else config.sync_s))

    def _need_dir(self, path: str) -> None:
        if path not in self.names.now.dirs:
            raise FileNotFoundError(path)

    def _saw(self, kind: str, *details: str | int) -> None:
        if self._trace is not None:
            self._trace.event(self.name, kind, *details)


def check_alive() -> None:
    """Raise ProcessDied in code of a process that has ended."""
    process = current_node.get()
    if process is not None:
        process.check_alive()


def _check_path(path: str) -> None:
    if not path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"expected a path relative to the disk's root, got {path!r}")
