"""How many scans a server has under way: each holds a page of every partition while its reader takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvstore.errors import Overloaded

SCANS_MAX = 32
WAIT_S, LOOK_S = 5.0, 0.1
"""How long one more waits for a place, and how often it looks."""
PATIENCE_S = 2.0
"""A scan whose reader has taken nothing for so long gives its place to one that waits."""


class Place:
    """One scan's."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._timeout: asyncio.Timeout | None = None
        self._is_lost = False
        self.unread_since: float | None = None
        """Since when its reader has taken nothing."""

    async def wait_read(self, sent: Awaitable[None]) -> None:
        """Wait until the reader has room for what is sent. Raises Overloaded if the place is given to another one."""
        self.unread_since = self._now()
        try:
            async with asyncio.timeout(None) as self._timeout:
                await sent
        except TimeoutError:
            if not self._is_lost:
                raise
        finally:
            self._timeout = self.unread_since = None
        if self._is_lost:
            raise Overloaded("the scan was read too slowly while others waited; go on behind the last key")

    def end(self) -> None:
        """Give the place up. Its reader may just have had room: that comes too late."""
        self._is_lost = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())


class ScanSlots:
    """All of a server's."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[Place, None] = {}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """A place for a scan. Raises Overloaded if none is free in time."""
        deadline = self._now() + WAIT_S
        while len(self._places) >= SCANS_MAX:
            self._end_slowest()
            if len(self._places) >= SCANS_MAX:
                if self._now() >= deadline:
                    raise Overloaded(f"{SCANS_MAX} scans are under way")
                await asyncio.sleep(LOOK_S)
        place = Place(self._now)
        self._places[place] = None
        try:
            yield place
        finally:
            self._places.pop(place, None)

    def _end_slowest(self) -> None:
        before = self._now() - PATIENCE_S
        slow = {each: since for each in self._places if (since := each.unread_since) is not None and since <= before}
        if slow:
            slowest = min(slow, key=slow.__getitem__)
            del self._places[slowest]
            slowest.end()
