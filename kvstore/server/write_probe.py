"""Finds out whether this node can write to its disks, by writing a small file to each of them.

Free bytes and permissions are not enough: a file system may have no free inodes, a quota may be used up, it may have
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
    """The write probes of one node. The data directory must be writable, and at least one directory of the bookie. Each
    directory has one probe at a time: a probe that hangs is not repeated until it returns."""

    def __init__(
        self,
        disk: Disk,
        now: Callable[[], float],
        rest: Callable[[float], Awaitable[None]],
    ) -> None:
        self.bookies: Callable[[], Sequence[str]] = tuple
        """Return the directories of this node's bookie that have not failed."""
        self.trouble = ""
        """Why this node cannot write, as of the last probe; empty if it can."""
        self.troubles: dict[str, str] = {}
        """Why directories cannot be written, by directory; "" is the data directory."""
        self._disk, self._now, self._rest = disk, now, rest
        self._began: dict[str, float] = {}
        """Start times of the probes in progress, by directory."""
        self._known_at: float | None = None
        self._checking: asyncio.Future[str] | None = None

    async def check(self) -> str:
        """Return why this node cannot write; empty if it can. Takes up to PATIENCE_S. Concurrent callers share one
        probe."""
        if self._checking is not None:
            return await shielded(self._checking)
        if self._known_at is not None and self._now() - self._known_at < FRESH_S:
            return self.trouble
        self._checking = found = asyncio.get_running_loop().create_future()
        try:
            self.trouble = await self._check()
            self._known_at = self._now()
        finally:
            self._checking = None
            found.set_result(self.trouble)
        return self.trouble

    async def run(self) -> None:
        """Keep `trouble` up to date for `kvstore status`."""
        while True:
            await self.check()
            await self._rest(EVERY_S)

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
