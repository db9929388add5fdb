"""A lock as both faces have it: who holds it, and the recipes of its methods, which the face's session carries out.
Decides only."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.client.coordination import queueing
from kvstore.client.coordination.lease import Lease
from kvstore.client.coordination.queueing import EXCLUSIVE, SHARED, Place
from kvstore.client.coordination.steps import Recipe
from kvstore.errors import InvalidRequest


class LockHead:
    """One who wants a lock, an election or a side of it, by a session whose time is `now()`."""

    def __init__(
        self,
        lease: Lease,
        now: Callable[[], float],
        name: bytes,
        *,
        kind: bytes = b"lock",
        shared: bool = False,
        value: bytes = b"",
    ) -> None:
        self._lease, self._now, self._value = lease, now, value
        self.prefix = lease.path(kind, name, b"")
        self.mode = SHARED if shared else EXCLUSIVE
        self.place: Place | None = None

    def acquire(self) -> Recipe[int]:
        """Stand in line until one's turn, and return the fencing token."""
        if self.is_held:
            raise InvalidRequest("this lock is held already; make one for each that waits")
        place = yield from queueing.acquire(self._lease, self.prefix, self.mode, self._value)
        if not self._lease.holds(place.key, self._now()):
            self._lease.discard(place.key)
            raise self._lease.ended()
        self.place = place
        return place.token

    def release(self) -> Recipe[bool]:
        """Give it up. True if it was held until now."""
        place, self.place = self.place, None
        if place is None:
            return False
        return (yield from queueing.release(self._lease, self.prefix, place, self.mode))

    def leader(self) -> Recipe[tuple[bytes, int] | None]:
        """The value and the token of who holds it."""
        return queueing.leader(self.prefix)

    def next_leader(self, known: int) -> Recipe[tuple[bytes, int] | None]:
        """The same, once it is another one."""
        return queueing.next_leader(self.prefix, known)

    @property
    def is_held(self) -> bool:
        return self.place is not None and self._lease.holds(self.place.key, self._now())

    @property
    def token(self) -> int:
        return 0 if self.place is None else self.place.token
