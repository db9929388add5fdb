"""The Disk port on a directory of the machine's file system (Linux)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EAGAIN
from functools import partial
from pathlib import Path

from msgspec import Struct

from kvstore.env.files.private import FILE_MODE, FOLDER_MODE
from kvstore.env.files.write_trial import try_file
from kvstore.env.ports import FILES_UNLIMITED, File
from kvstore.env.syncs import Done, Syncs, ThreadSyncs, Write, write_all
from kvstore.errors import ConfigError
from kvstore.os_errors import SyncFailed, reason_of

LOCK_NAME = "LOCK"
PROBE_NAMES = ("write-probe", "write-probe.new")
"""Names of the file with which a probe tests a directory. If a crash leaves the file, the next probe removes it."""
_HOLDER_BYTES = 32


class _Sync(Struct, eq=False):
    """One sync in flight."""

    done: Done
    is_over: bool = False
    error: OSError | None = None


class DirectoryFile:
    """An open file. Writes go to the page cache. Syncs run off the event loop and are reported in the order of
    submission."""

    def __init__(self, fd: int, syncs: Syncs) -> None:
        self._fd = fd
        self._syncs = syncs
        self._in_flight: deque[_Sync] = deque()
        self._is_closed = False

    def pwrite(self, offset: int, data: bytes) -> None:
        write_all(self._fd, offset, data)

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        if len(data) == size:
            return data
        parts = [data]
        have = len(data)
        while data and have < size:
            data = os.pread(self._fd, size - have, offset + have)
            parts.append(data)
            have += len(data)
        return b"".join(parts)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, size: int) -> None:
        """Extend the file to `size` bytes. Do nothing if the file is already longer. Raises OSError."""
        if size > 0:
            os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def submit_sync(self, done: Done) -> None:
        """Start a sync. Raises ValueError if the file is closed, OSError if the kernel does not accept the sync."""
        self._submit(done, None, is_synced=True)

    def submit_write(self, offset: int, data: bytes, done: Done, *, is_synced: bool = True) -> None:
        """Start a write. Raises ValueError if the file is closed, OSError if the kernel does not accept the write."""
        self._submit(done, (offset, data), is_synced=is_synced)

    def _submit(self, done: Done, write: Write | None, *, is_synced: bool) -> None:
        if self._is_closed:
            raise ValueError("the file is closed")
        sync = _Sync(done)
        self._syncs.submit(self._fd, partial(self._over, sync), write, is_synced=is_synced)
        self._in_flight.append(sync)

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise SyncFailed(*error.args) from error

    def close(self) -> None:
        """Close the file. Its descriptor stays open until all syncs in flight are done. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if not self._in_flight:
                self._release()

    def _over(self, ended: _Sync, error: OSError | None) -> None:
        """Report finished syncs in the order of submission. A sync that ends early waits for the earlier syncs."""
        ended.error, ended.is_over = error, True
        in_flight = self._in_flight
        while in_flight and in_flight[0].is_over:
            sync = in_flight.popleft()
            if self._is_closed and not in_flight:
                self._release()
            sync.done(sync.error)

    def _release(self) -> None:
        fd, self._fd = self._fd, -1  # a descriptor that is used after this is refused, and never another file's
        os.close(fd)


class DirectoryDisk:
    """All files below one directory. Subdirectories may be mount points or links, but no path that a caller passes
    leads out of the directory. Absolute paths are refused, except for paths below one of `others`."""

    def __init__(self, root: Path, syncs: Syncs | None = None, others: Sequence[Path] = ()) -> None:
        """Open the directory, and create it if it is absent. Raises OSError if `root` is not a directory and cannot
        be created."""
        root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self._root = str(root.resolve())
        self._others = tuple(str(each) for each in others)
        self._syncs = syncs or ThreadSyncs()

    def open(self, path: str, *, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return DirectoryFile(os.open(self.real_path(path), flags, FILE_MODE), self._syncs)

    def exists(self, path: str) -> bool:
        return os.path.exists(self.real_path(path))

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.real_path(path)))
        except FileNotFoundError:
            return []

    def mkdir(self, path: str) -> None:
        os.makedirs(self.real_path(path), mode=FOLDER_MODE, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory. Raises FileNotFoundError, OSError (ENOTEMPTY)."""
        real = self.real_path(path)
        if os.path.isdir(real) and not os.path.islink(real):
            os.rmdir(real)
        else:
            os.unlink(real)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.real_path(old), self.real_path(new))

    def sync_dir(self, path: str) -> None:
        fd = os.open(self.real_path(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)

    def free_bytes(self, path: str = "") -> int:
        """Return the number of bytes that processes without privileges may still use."""
        found = os.statvfs(self.real_path(path))
        return found.f_bavail * found.f_frsize

    def free_files(self, path: str = "") -> int:
        """Return the number of inodes that processes without privileges may still use."""
        found = os.statvfs(self.real_path(path))
        return found.f_favail if found.f_files else FILES_UNLIMITED

    def submit_probe(self, path: str, done: Callable[[OSError | None], None]) -> None:
        """Test a directory in a separate thread. If the disk hangs, the thread hangs with it, and the process can
        still end."""
        loop, real = asyncio.get_running_loop(), self.real_path(path)

        def probe() -> None:
            error = _probe(real)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done, error)

        try:
            threading.Thread(target=probe, name="write probe", daemon=True).start()
        except RuntimeError as error:
            loop.call_soon(done, OSError(EAGAIN, f"a thread that tests the directory: {error}"))

    def real_path(self, path: str) -> str:
        """Return the path in the machine's file system; "" is the root. Raises ValueError for a path that is not
        plainly below the root."""
        if not path:
            return self._root
        is_other = any(path == each or path.startswith(f"{each}/") for each in self._others)
        parts = (path.removeprefix("/") if is_other else path).split("/")
        if "\0" in path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"expected a path relative to the root and below it, got {path!r}")
        return path if is_other else f"{self._root}/{path}"

    def close(self) -> None:
        """Free the resources of syncs. A process that is about to end need not call this."""
        self._syncs.close()


def _probe(directory: str) -> OSError | None:
    """Return the reason, in words for an operator, why no file can be written to the directory, or None. Blocks."""
    try:
        try_file(directory, PROBE_NAMES)
    except OSError as error:
        has_inodes = True
        with suppress(OSError):
            found = os.statvfs(directory)
            has_inodes = not found.f_files or found.f_favail > 0
        return OSError(error.errno, reason_of(error, directory, has_inodes=has_inodes))
    return None


class DirectoryLock:
    """A lock on a directory, held until `close` or the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lock_dir(directory: Path) -> DirectoryLock:
    """Lock a directory against other processes, and create it if it is absent. Raises ConfigError if another process
    has the lock, OSError if the directory cannot be locked."""
    directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    path = directory / LOCK_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(f"{directory} is in use by another process (pid {holder or 'unknown'})") from error
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from error
    try:
        os.pwrite(
            fd, f"{os.getpid():<{_HOLDER_BYTES - 1}}\n".encode(), 0
        )  # in place: a freed block might not be available again
    except OSError:  # for people only: a full or failing disk must not keep the process from starting
        with suppress(OSError):
            os.ftruncate(fd, 0)  # people must not take the previous holder for this one
    return DirectoryLock(fd)
