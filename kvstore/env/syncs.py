"""Writes and syncs of files that do not hold up the event loop: the port that files use, and threads that implement
it."""

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
    """The write of a write and sync failed, so that nothing was synced. It may be repeated."""


class Syncs(Protocol):
    """Carries out pwrite and fdatasync beside the event loop."""

    def submit(self, fd: int, done: Done, write: Write | None = None, *, is_synced: bool = True) -> None:
        """Write, if there is something to write, and sync `fd`, then call `done` on the running loop. In no order; `fd`
        stays open until then. Raises OSError if it cannot be begun: `done` is not called."""
        ...

    def report(self) -> None:
        """Call `done` now for what has ended, as far as that can be seen at no cost. To be called by the event loop's
        callbacks only, as the last thing that they do."""
        ...

    def close(self) -> None:
        """Free what is held. What is under way may never be reported."""
        ...


class ThreadSyncs:
    """Syncs by threads, of each device by its own: one that hangs holds up no other. Where the event loop is busy
    without a pause, a report can be late by many milliseconds: the thread needs the interpreter for it.
    `sys.setswitchinterval` bounds that in part."""

    THREADS = 4
    """As many files of a device can sync at once; started at its first sync, fewer where no more may be."""

    def __init__(self) -> None:
        self._jobs: dict[int, Jobs] = {}
        """By device."""

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
    """The device that has the file; partitions of one disk are several."""
    return os.fstat(fd).st_dev


def write_all(fd: int, offset: int, data: bytes) -> None:
    """Write all of `data`, in several calls if the kernel wants it so. Raises OSError."""
    written = os.pwrite(fd, data, offset)
    if written == len(data):
        return
    rest = memoryview(data)
    while written < len(rest):
        written += os.pwrite(fd, rest[written:], offset + written)


def _carry_out(fd: int, write: Write | None, *, is_synced: bool) -> OSError | None:
    """Return what went wrong."""
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
