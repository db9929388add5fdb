"""Limits the number of scans on a server and the memory that they hold. Each scan holds a page of every partition
while its reader reads slowly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from kvstore.env.events import wait_within
from kvstore.errors import Overloaded

SCANS_MAX = 32
SCANS_OF_USER_MAX = 8
"""Maximum number of scans of one user, over all endpoints and connections."""
WAITING_MAX = 1_000
"""Maximum number of waiting scans; further ones are refused at once."""
HELD_BYTES_MAX = 128 << 20
"""Maximum bytes of keys and values held by all scans of a server. A single scan may hold more, because it needs a page
of each partition."""
WAIT_S, CHECK_S = 5.0, 0.1
"""Time that a further scan waits for a slot, and interval of its checks."""
PATIENCE_S = 2.0
"""Time after which a scan whose reader has read nothing loses its slot to a waiting scan."""


class ScanSlot:
    """The slot that one scan holds."""

    def __init__(self, now: Callable[[], float], places: Mapping[ScanSlot, str]) -> None:
        self._now, self._places = now, places
        self.held_bytes = 0
        self._timeout: asyncio.Timeout | None = None
        self._is_lost = False
        self.unread_since: float | None = None
        """Time since which the reader has not read what was sent, or None if it has read everything."""

    # docs/protocol.md P37
    def hold(self, size: int) -> None:
        """Set the number of bytes that the scan holds now. Raises Overloaded if the number has grown and all scans
        together hold too much."""
        is_more, self.held_bytes = size > self.held_bytes, size
        total = sum(each.held_bytes for each in self._places)
        if is_more and size < total and total > HELD_BYTES_MAX:
            raise Overloaded(
                f"the running scans hold {total} bytes, more than the limit of {HELD_BYTES_MAX}; retry later"
            )

    async def wait_read(self, sent: Awaitable[None]) -> None:
        """Wait until the reader has accepted the data. Raises Overloaded if the slot is given to another scan."""
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
            raise Overloaded("the scan was read too slowly while other scans waited; continue after the last key")

    def end(self) -> None:
        """Take the slot away from the scan, even if its reader accepts data at the same moment."""
        self._is_lost = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())


class _Waiter:
    """A scan that waits for a slot."""

    def __init__(self, number: int) -> None:
        self.number = number
        """A lower number has waited longer."""
        self.granted = asyncio.Event()
        self.place: ScanSlot | None = None


class ScanSlots:
    """The slots for all scans and counts of a server, shared by every endpoint."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[ScanSlot, str] = {}
        """The user of each slot."""
        self._of_user: Counter[str] = Counter()
        """Number of slots of each user."""
        self._waiting: dict[str, dict[_Waiter, None]] = {}
        """Waiting scans by user, the oldest first."""
        self._waits = self._waits_begun = 0

    @asynccontextmanager
    async def place(self, user: str = "") -> AsyncIterator[ScanSlot]:
        """Hold a slot for a scan of this user while the context is open. With an empty user access control is off,
        and there is no limit per user. Raises Overloaded if no slot becomes free within WAIT_S seconds."""
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
        """Free a slot and give it to a waiting scan, unless it was already taken away."""
        user = self._places.pop(place, None)
        if user is None:
            return
        self._of_user[user] -= 1
        if not self._of_user[user]:
            del self._of_user[user]
        self._hand_on()

    async def _wait(self, user: str) -> ScanSlot:
        if self._waits >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} scans already wait for a slot; retry later")
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
                await wait_within(waiter.granted, CHECK_S)
        except BaseException:
            if waiter.place is not None:  # granted at the moment of cancellation
                self._give_back(waiter.place)
            raise
        finally:
            self._waits -= 1
            self._forget(user, waiter)

    def _forget(self, user: str, waiter: _Waiter) -> None:
        """Remove a scan from the waiting scans, if it is among them."""
        waiters = self._waiting.get(user, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiting.pop(user, None)

    def _why_none(self, user: str) -> str:
        if len(self._places) >= SCANS_MAX:
            return f"{SCANS_MAX} scans are running; retry later"
        return f"{SCANS_OF_USER_MAX} scans of user {user} are running; retry later"

    def _hand_on(self) -> None:
        """Give free slots to waiting scans, the oldest first. The cost depends on the number of users with waiting
        scans, not on the number of scans."""
        while len(self._places) < SCANS_MAX:
            oldest = ((next(iter(each)), user) for user, each in self._waiting.items() if self._has_free(user))
            waiter, user = min(oldest, key=lambda each: each[0].number, default=(None, ""))
            if waiter is None:
                return
            self._forget(user, waiter)
            waiter.place = self._taken(user)
            waiter.granted.set()

    def _end_slowest(self, user: str) -> None:
        """Take the slot of the slowest reader: of any user, or of this user if the user's own slots are used up."""
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
