"""How many scans a server has under way, and how much they hold together: each holds a page of every partition while
its reader takes its time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from kvstore.env.events import wait_within
from kvstore.errors import Overloaded

SCANS_MAX = 32
SCANS_OF_USER_MAX = 8
"""Of one user, whatever endpoints and connections they come from."""
WAITING_MAX = 1_000
"""Scans that wait for a place; further ones are refused at once."""
HELD_BYTES_MAX = 128 << 20
"""Of keys and values, by all scans of a server; one alone may hold more: a page of each partition is what it needs."""
WAIT_S, LOOK_S = 5.0, 0.1
"""How long one more waits for a place, and how often it looks."""
PATIENCE_S = 2.0
"""A scan whose reader has taken nothing for so long gives its place to one that waits."""


class ScanSlot:
    """The place of one scan."""

    def __init__(self, now: Callable[[], float], places: Mapping[ScanSlot, str]) -> None:
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


class _Waiter:
    """A scan that waits for a place."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Of two, the one with the lower number has waited longer."""
        self.granted = asyncio.Event()
        self.place: ScanSlot | None = None


class ScanSlots:
    """The places of all scans and counts of a server, at every endpoint."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[ScanSlot, str] = {}
        """The user of each."""
        self._of_user: Counter[str] = Counter()
        """Places of each user."""
        self._waiting: dict[str, dict[_Waiter, None]] = {}
        """Scans that wait, by user; the oldest of a user is the first."""
        self._waits = self._waits_begun = 0

    @asynccontextmanager
    async def place(self, user: str = "") -> AsyncIterator[ScanSlot]:
        """Hold a place for a scan of this user; empty: nobody is asked who he is, and no user has a bound of his own.
        Raises Overloaded if none is free in time."""
        place = self._taken(user) if self._has_free(user) else await self._wait(user)
        try:
            yield place
        finally:
            self._give_back(place)

    def _has_free(self, user: str) -> bool:
        return len(self._places) < SCANS_MAX and (not user or self._of_user[user] < SCANS_OF_USER_MAX)

    def _taken(self, user: str) -> ScanSlot:
        place = ScanSlot(self._now, self._places)
        self._places[place] = user
        self._of_user[user] += 1
        return place

    def _give_back(self, place: ScanSlot) -> None:
        """Free a place, unless another scan has been given it, and let others have it."""
        user = self._places.pop(place, None)
        if user is None:
            return
        self._of_user[user] -= 1
        if not self._of_user[user]:
            del self._of_user[user]
        self._hand_on()

    async def _wait(self, user: str) -> ScanSlot:
        if self._waits >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} scans wait for others to end; try again later")
        self._waits_begun += 1
        deadline, waiter = self._now() + WAIT_S, _Waiter(self._waits_begun)
        self._waiting.setdefault(user, {})[waiter] = None
        self._waits += 1
        try:
            while True:
                self._end_slowest(user)
                if waiter.place is not None:
                    return waiter.place
                if self._now() >= deadline:
                    raise Overloaded(self._why_none(user))
                await wait_within(waiter.granted, LOOK_S)
        except BaseException:
            if waiter.place is not None:  # granted in the moment in which its caller gave up
                self._give_back(waiter.place)
            raise
        finally:
            self._waits -= 1
            self._forget(user, waiter)

    def _forget(self, user: str, waiter: _Waiter) -> None:
        """Take a scan out of those that wait, if it is there."""
        waiters = self._waiting.get(user, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiting.pop(user, None)

    def _why_none(self, user: str) -> str:
        if len(self._places) >= SCANS_MAX:
            return f"{SCANS_MAX} scans are under way"
        return f"{SCANS_OF_USER_MAX} scans of user {user} are under way"

    def _hand_on(self) -> None:
        """Give free places to those that wait, the oldest first. The cost depends on the users that wait, and not on
        the scans of each."""
        while len(self._places) < SCANS_MAX:
            oldest = ((next(iter(each)), user) for user, each in self._waiting.items() if self._has_free(user))
            waiter, user = min(oldest, key=lambda each: each[0].number, default=(None, ""))
            if waiter is None:
                return
            self._forget(user, waiter)
            waiter.place = self._taken(user)
            waiter.granted.set()

    def _end_slowest(self, user: str) -> None:
        """Take the place of the slowest reader: of any user, or of this one if he has all of his own."""
        is_full, before = len(self._places) >= SCANS_MAX, self._now() - PATIENCE_S
        slow = {
            each: since
            for each, whose in self._places.items()
            if (is_full or whose == user) and (since := each.unread_since) is not None and since <= before
        }
        if slow and not self._has_free(user):
            slowest = min(slow, key=slow.__getitem__)
            slowest.end()
            self._give_back(slowest)
