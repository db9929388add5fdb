"""Finds out whether this node's disks can be written to, by writing a small file to each of them.

Neither free bytes nor permissions tell that: a file system may have no inodes left, a quota may be used up, it may have
become read-only, or its device may not answer. A node that cannot write must not lead (docs/protocol.md, P41).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kvstore.env.nursery import shielded
from kvstore.env.ports import Disk

PATIENCE_S = 3.0
"""A disk that has not stored the file by then does not answer. Only this node's own candidacy waits for it."""
FRESH_S = 1.0
"""A result serves all candidates of a node for so long: a server that dies leaves many partitions without a leader."""
EVERY_S = 10.0
"""Between two probes for `kvstore status`."""


class WriteProbe:
    """The probes of one node: of its data directory, which must be written to, and of its bookie's directories, one of
    which must be. One probe of a directory at a time: what hangs is not tried again until it returns."""

    def __init__(
        self,
        disk: Disk,
        now: Callable[[], float],
        rest: Callable[[float], Awaitable[None]],
    ) -> None:
        self.bookies: Callable[[], Sequence[str]] = tuple
        """The directories of this node's bookie that have not failed."""
        self.trouble = ""
        """Why this node cannot write, as far as was found out last; empty if it can."""
        self.troubles: dict[str, str] = {}
        """By directory, of those that could not be written to. "" is the data directory."""
        self._disk, self._now, self._rest = disk, now, rest
        self._began: dict[str, float] = {}
        """The probes under way."""
        self._known_at: float | None = None
        self._checking: asyncio.Future[str] | None = None

    async def check(self) -> str:
        """Return why this node cannot write; empty if it can. Takes up to PATIENCE_S, and shares what others ask."""
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
        """Keep `trouble` up to date for operators."""
        while True:
            await self.check()
            await self._rest(EVERY_S)

    async def _check(self) -> str:
        bookies = list(self.bookies())
        await self._probe_all(["", *bookies])
        if "" in self.troubles:
            return self.troubles[""]
        failed = [self.troubles[each] for each in bookies if each in self.troubles]
        return f"its bookie cannot write: {failed[0]}" if failed and len(failed) == len(bookies) else ""

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
                self.troubles[directory] = f"its disk does not answer for {PATIENCE_S:.0f} s"
