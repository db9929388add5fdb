"""Writes and syncs of files that do not block the event loop: the port that files use, and threads that
implement it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

Done = Callable[[OSError | None], None]
Write = tuple[int, bytes]
"""Offset and data."""
Jobs = SimpleQueue[tuple[int, Write | None, bool, asyncio.AbstractEventLoop, Done] | None]


class NotWritten(OSError):
    """The write of a combined write and sync failed, so nothing was synced. The caller may repeat both."""


class Syncs(Protocol):
    """Runs pwrite and fdatasync off the event loop."""

    def submit(self, fd: int, done: Done, write: Write | None = None, *, is_synced: bool = True) -> None:
        """Write the data, if there are any, sync `fd`, and call `done` on the running loop. Jobs may end in any
        order. `fd` must stay open until then. Raises OSError if the job cannot begin; then `done` is not called."""
        ...

    def report(self) -> None:
        """Call `done` now for each job that is known to have ended, as far as this can be found out at no cost. Only
        callbacks of the event loop may call this, as their last step."""
        ...

    def close(self) -> None:
        """Free all resources. Syncs in flight may never be reported."""
        ...


class ThreadSyncs:
    """Syncs by threads, with its own threads for each device, so that a device that hangs does not delay another
    one. While the event loop is busy without a pause, reports can be late by many milliseconds, because the thread
    needs the interpreter. `sys.setswitchinterval` bounds that in part."""

    THREADS = 4
    """Threads of a device, which bound its concurrent syncs. Started at its first sync; fewer if no more threads are
    allowed."""

    def __init__(self) -> None:
        self._jobs: dict[int, Jobs] = {}
        """Queues by device."""

    def submit(self, fd: int, done: Done, write: Write | None = None, *, is_synced: bool = True) -> None:
        device = device_of(fd)
        jobs = self._jobs.get(device)
        if jobs is None:
            jobs = self._jobs[device] = self._begin()
        jobs.put((fd, write, is_synced, asyncio.get_running_loop(), done))

    def report(self) -> None:
        """Do nothing: threads report to the loop themselves."""

    def close(self) -> None:
        for jobs in self._jobs.values():
            for _ in range(self.THREADS):
                jobs.put(None)

    def _begin(self) -> Jobs:
        """Start the threads of a device. Raises OSError."""
        jobs: Jobs = SimpleQueue()
        for number in range(self.THREADS):
            thread = Thread(target=_work, args=(jobs,), name=f"sync-{len(self._jobs) + 1}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not number:
                    raise OSError(errno.EAGAIN, f"a thread that syncs: {error}") from error
                break
        return jobs


def device_of(fd: int) -> int:
    """Return the device of the file; partitions of one disk are several devices."""
    return os.fstat(fd).st_dev


def write_all(fd: int, offset: int, data: bytes) -> None:
    """Write all of `data`, in several calls if the kernel splits it. Raises OSError."""
    written = os.pwrite(fd, data, offset)
    if written == len(data):
        return
    rest = memoryview(data)
    while written < len(rest):
        written += os.pwrite(fd, rest[written:], offset + written)


def _carry_out(fd: int, write: Write | None, *, is_synced: bool) -> OSError | None:
    """Write and sync. Returns the error, or None."""
    if write is not None:
        try:
            write_all(fd, *write)
        except OSError as error:
            return NotWritten(*error.args)
    if is_synced:
        try:
            os.fdatasync(fd)
        except OSError as error:
            return error
    return None


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        fd, write, is_synced, loop, done = job
        error = _carry_out(fd, write, is_synced=is_synced)
        try:
            loop.call_soon_threadsafe(done, error)
        except RuntimeError:
            return  # the loop has been closed: nobody waits any more
