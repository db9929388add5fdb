"""How many scans a server has under way, and how much they hold together: each holds a page of every partition while
its reader takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvstore.errors import Overloaded

SCANS_MAX = 32
HELD_BYTES_MAX = 128 << 20
"""Of keys and values, by all scans of a door; one alone may hold more: a page of each partition is what it needs."""
WAIT_S, LOOK_S = 5.0, 0.1
"""How long one more waits for a place, and how often it looks."""
PATIENCE_S = 2.0
"""A scan whose reader has taken nothing for so long gives its place to one that waits."""


class Place:
    """The place of one scan."""

    def __init__(self, now: Callable[[], float], places: dict[Place, None]) -> None:
        self._now, self._places = now, places
        self.held_bytes = 0
        self._timeout: asyncio.Timeout | None = None
        self._is_lost = False
        self.unread_since: float | None = None
        """Since when its reader has taken nothing."""

    # docs/protocol.md P37
    def hold(self, size: int) -> None:
        """Say how much the scan holds now. Raises Overloaded if that is more than before, and all hold too much."""
        is_more, self.held_bytes = size > self.held_bytes, size
        total = sum(each.held_bytes for each in self._places)
        if is_more and size < total and total > HELD_BYTES_MAX:
            raise Overloaded(f"the scans under way hold {total} bytes, more than {HELD_BYTES_MAX}; ask again later")

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
    """The places of all scans of a server."""

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
        place = Place(self._now, self._places)
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
