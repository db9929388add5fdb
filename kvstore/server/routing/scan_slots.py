"""Limits the number of scans on a server and the memory that they hold. Each scan holds a page of every partition
while its reader reads slowly.

A scan that is read keeps its slot to its end, because the work of a count or of `KEYS` would be lost. So that one
client cannot keep the others out, a user or a network takes no more slots than it leaves free (kvstore/env/shares.py),
and no more places in the line of waiting scans.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from kvstore.env.events import wait_within
from kvstore.env.shares import may_take_slot
from kvstore.errors import Overloaded

SCANS_MAX = 32
"""Maximum number of scans. One user or network takes at most half of the slots."""
SCANS_OF_USER_MAX = 8
"""Maximum number of scans of one user, over all endpoints and connections."""
WAITING_MAX = 1_000
"""Maximum number of waiting scans. Further ones are refused at once."""
HELD_BYTES_MAX = 128 << 20
"""Maximum bytes of keys and values held by all scans of a server. A single scan may hold more, because it needs a page
of each partition."""
WAIT_S, CHECK_S = 5.0, 0.1
"""Time that a further scan waits for a slot, and interval of its checks."""
PATIENCE_S = 2.0
"""Time after which a scan whose reader has read nothing loses its slot to a waiting scan."""


class ScanOwner(NamedTuple):
    """The user whose share of the slots a scan uses, or the network if access control is off."""

    user: str
    network: str


class ScanSlot:
    """The slot that one scan holds."""

    def __init__(self, now: Callable[[], float], places: Mapping[ScanSlot, ScanOwner]) -> None:
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
        self._places: dict[ScanSlot, ScanOwner] = {}
        self._of_owner: Counter[ScanOwner] = Counter()
        """Number of slots of each owner."""
        self._waiting: dict[ScanOwner, dict[_Waiter, None]] = {}
        """Waiting scans by owner, the oldest first."""
        self._waits = self._waits_begun = 0

    @asynccontextmanager
    async def place(self, user: str, network: str) -> AsyncIterator[ScanSlot]:
        """Hold a slot for a scan while the context is open. `network` is the client's, and counts if `user` is empty
        because access control is off. Raises Overloaded if no slot becomes free within WAIT_S seconds."""
        owner = ScanOwner(user, "" if user else network)
        place = self._taken(owner) if self._has_free(owner) else await self._wait(owner)
        try:
            yield place
        finally:
            self._give_back(place)

    def _has_free(self, owner: ScanOwner) -> bool:
        count = self._of_owner[owner]
        return may_take_slot(count, SCANS_MAX - len(self._places)) and not (owner.user and count >= SCANS_OF_USER_MAX)

    def _taken(self, owner: ScanOwner) -> ScanSlot:
        place = ScanSlot(self._now, self._places)
        self._places[place] = owner
        self._of_owner[owner] += 1
        return place

    def _give_back(self, place: ScanSlot) -> None:
        """Free a slot and give it to a waiting scan, unless it was already taken away."""
        owner = self._places.pop(place, None)
        if owner is None:
            return
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        self._hand_on()

    async def _wait(self, owner: ScanOwner) -> ScanSlot:
        if not may_take_slot(len(self._waiting.get(owner, ())), WAITING_MAX - self._waits):
            raise Overloaded(
                f"expected at most {WAITING_MAX} scans that wait for a slot, and at most as many of one user or "
                f"network as are free, got {self._waits} and one more; retry later"
            )
        self._waits_begun += 1
        deadline, waiter = self._now() + WAIT_S, _Waiter(self._waits_begun)
        self._waiting.setdefault(owner, {})[waiter] = None
        self._waits += 1
        try:
            while True:
                self._end_slowest(owner)
                if waiter.place is not None:
                    return waiter.place
                if self._now() >= deadline:
                    raise Overloaded(self._why_none(owner))
                await wait_within(waiter.granted, CHECK_S)
        except BaseException:
            if waiter.place is not None:  # granted at the moment of cancellation
                self._give_back(waiter.place)
            raise
        finally:
            self._waits -= 1
            self._forget(owner, waiter)

    def _forget(self, owner: ScanOwner, waiter: _Waiter) -> None:
        """Remove a scan from the waiting scans, if it is among them."""
        waiters = self._waiting.get(owner, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiting.pop(owner, None)

    def _why_none(self, owner: ScanOwner) -> str:
        if len(self._places) >= SCANS_MAX:
            return f"{SCANS_MAX} scans are running; retry later"
        whose = f"user {owner.user}" if owner.user else f"network {owner.network}"
        return f"{self._of_owner[owner]} scans of {whose} are running; retry later"

    def _hand_on(self) -> None:
        """Give free slots to waiting scans, the oldest first. The cost depends on the number of owners with waiting
        scans, not on the number of scans."""
        while len(self._places) < SCANS_MAX:
            oldest = ((next(iter(each)), owner) for owner, each in self._waiting.items() if self._has_free(owner))
            found = min(oldest, key=lambda each: each[0].number, default=None)
            if found is None:
                return
            waiter, owner = found
            self._forget(owner, waiter)
            waiter.place = self._taken(owner)
            waiter.granted.set()

    def _end_slowest(self, owner: ScanOwner) -> None:
        """Take the slot of the slowest reader: of any owner, or of this owner if the owner's own slots are used up."""
        is_full, before = len(self._places) >= SCANS_MAX, self._now() - PATIENCE_S
        slow = {
            each: since
            for each, whose in self._places.items()
            if (is_full or whose == owner) and (since := each.unread_since) is not None and since <= before
        }
        if slow and not self._has_free(owner):
            slowest = min(slow, key=slow.__getitem__)
            slowest.end()
            self._give_back(slowest)
