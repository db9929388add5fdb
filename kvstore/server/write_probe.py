"""Detects whether this node can write to its disks, by writing a small file to each of them.

Free bytes and permissions are not enough: a file system may have no free inodes, its quota may be used up, it may have
become read-only, or its device may not answer. A node that cannot write must not lead (docs/protocol.md, P41).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvstore.env.nursery import shielded
from kvstore.env.ports import Disk

PATIENCE_S = 3.0
"""Time after which a disk counts as not answering. Only this node's own candidacy waits for it."""
FRESH_S = 1.0
"""Time for which a result is shared by all candidates of a node: a server that dies leaves many partitions without a
leader."""
EVERY_S = 10.0
"""Interval of the probes for `kvstore status`."""


class WriteProbe:
    """The write probes of one node. The node can write if its data directory and at least one directory of its
    bookie are writable. Each directory has at most one probe in progress: a probe that hangs is not repeated until
    it returns."""

    def __init__(
        self,
        disk: Disk,
        now: Callable[[], float],
        rest: Callable[[float], Awaitable[None]],
    ) -> None:
        self.bookies: Callable[[], Sequence[str]] = tuple
        """Returns the directories of this node's bookie that have not failed."""
        self.trouble = ""
        """The reason why this node cannot write, as of the last probe. Empty if it can write."""
        self.troubles: dict[str, str] = {}
        """The reason why each directory cannot be written, by directory. The key "" is the data directory."""
        self._disk, self._now, self._pause = disk, now, rest
        self._began: dict[str, float] = {}
        """Start times of the probes in progress, by directory."""
        self._known_at: float | None = None
        self._checking: asyncio.Future[str | None] | None = None
        """The result of the probe in progress; None if its caller was cancelled."""

    async def check(self) -> str:
        """Probe the directories and return why this node cannot write, or an empty string if it can. Takes up to
        PATIENCE_S seconds. Concurrent callers share one probe, and a result is reused for FRESH_S seconds."""
        while self._checking is not None:
            if (shared := await shielded(self._checking)) is not None:
                return shared
        if self._known_at is not None and self._now() - self._known_at < FRESH_S:
            return self.trouble
        self._checking = checking = asyncio.get_running_loop().create_future()
        found: str | None = None
        try:
            self.trouble = found = await self._check()
            self._known_at = self._now()
        finally:
            self._checking = None
            checking.set_result(found)
        return self.trouble

    async def run(self) -> None:
        """Probe every EVERY_S seconds and keep `trouble` up to date for `kvstore status`. Runs until cancelled."""
        while True:
            await self.check()
            await self._pause(EVERY_S)

    async def _check(self) -> str:
        bookies = list(self.bookies())
        await self._probe_all(["", *bookies])
        if "" in self.troubles:
            return self.troubles[""]
        failed = [self.troubles[each] for each in bookies if each in self.troubles]
        return f"the bookie cannot write: {failed[0]}" if failed and len(failed) == len(bookies) else ""

    async def _probe_all(self, directories: list[str]) -> None:
        ended = asyncio.Event()
        waiting = set(directories)

        def over(directory: str, error: OSError | None) -> None:
            self._began.pop(directory, None)
            self.troubles.pop(directory, None)
            if error is not None:
                self.troubles[directory] = error.strerror or str(error)
            waiting.discard(directory)
            if not waiting:
                ended.set()

        for directory in directories:
            if directory not in self._began:
                self._began[directory] = self._now()
                self._disk.submit_probe(directory, partial(over, directory))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ended.wait()
        except TimeoutError:
            for directory in waiting:
                self.troubles[directory] = f"its disk has not answered for {PATIENCE_S:.0f} s"
