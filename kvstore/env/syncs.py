"""Syncs of files that do not hold up the event loop: the port that files use, and threads that implement it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

Done = Callable[[OSError | None], None]


class Syncs(Protocol):
    """Carries out fdatasync beside the event loop."""

    def submit(self, fd: int, done: Done) -> None:
        """Sync `fd`, then call `done` on the running loop. In no order; `fd` stays open until then."""
        ...

    def report(self) -> None:
        """Call `done` now for what has ended, as far as that can be seen at no cost. To be called by the event loop's
        callbacks only, as the last thing that they do."""
        ...

    def close(self) -> None:
        """Free what is held. What is under way may never be reported."""
        ...


class ThreadSyncs:
    """Syncs by threads. Where the event loop is busy without a pause, a report can be late by many milliseconds: the
    thread needs the interpreter for it. `sys.setswitchinterval` bounds that in part."""

    THREADS = 4
    """As many files can sync at once; started at the first sync."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[int, asyncio.AbstractEventLoop, Done] | None] = SimpleQueue()
        self._is_started = False

    def submit(self, fd: int, done: Done) -> None:
        if not self._is_started:
            self._is_started = True
            for number in range(self.THREADS):
                Thread(target=self._work, name=f"sync-{number}", daemon=True).start()
        self._jobs.put((fd, asyncio.get_running_loop(), done))

    def report(self) -> None:
        """Do nothing: threads report to the loop themselves."""

    def close(self) -> None:
        for _ in range(self.THREADS if self._is_started else 0):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            fd, loop, done = job
            error: OSError | None = None
            try:
                os.fdatasync(fd)
            except OSError as failed:
                error = failed
            try:
                loop.call_soon_threadsafe(done, error)
            except RuntimeError:
                return  # the loop has been closed: nobody waits any more
