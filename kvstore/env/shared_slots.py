"""Slots for requests that last as long as their clients want, shared by user or network.

A client whose request loses its slot continues with another request where the first one ended: a watch and a reader of
changes at their position, a pinned read behind its last page. Therefore a newcomer may displace a request of an owner
with more slots (kvstore/env/shares.py), and no owner keeps the others out. Requests that would lose work have limits of
another kind (`may_take` there).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.env.networks import KnownNetworks
from kvstore.env.shares import Shares
from kvstore.errors import Overloaded


class _Occupant:
    """A request that holds a slot. `timeout` ends when another request needs the slot."""

    __slots__ = ("is_displaced", "timeout")

    def __init__(self) -> None:
        self.timeout, self.is_displaced = asyncio.timeout(None), False

    def displace(self) -> None:
        self.is_displaced = True
        self.timeout.reschedule(asyncio.get_running_loop().time())


class SharedSlots:
    """A limited number of slots for requests of one kind at one server."""

    def __init__(self, most: int, what: str) -> None:
        """`what` names the requests in errors, in the plural."""
        self.most = most
        self.refused = 0
        """Requests refused or displaced since the start."""
        self._what = what
        self._occupants: Shares[_Occupant] = Shares(KnownNetworks())
        """The requests by owner. No owner counts as known, so all of them share the slots alike."""

    def __len__(self) -> int:
        return len(self._occupants)

    def is_full_for(self, owner: str) -> bool:
        """Return True if a request of this owner would be refused now."""
        return len(self) >= self.most and self._occupants.displaced_by(owner) is None

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Hold a slot while the context is open. `owner` is the user or the network of the client.

        Raises Overloaded if all slots are taken and no owner has more of them than this one would have. Also raises
        Overloaded later, at a wait inside the context, if the slot is given to another owner with fewer slots.
        """
        if self.is_full_for(owner):
            self.refused += 1
            raise Overloaded(
                f"expected at most {self.most} {self._what} at this server, got one more; retry at another server"
            )
        occupant = _Occupant()
        if len(self) >= self.most and (displaced := self._occupants.displaced_by(owner)) is not None:
            self.refused += 1
            self._occupants.discard(displaced)
            displaced.displace()
        self._occupants.add(occupant, owner)
        try:
            async with occupant.timeout:
                yield
        except TimeoutError:
            if not occupant.is_displaced:
                raise
            raise Overloaded(
                f"expected at most {self.most} {self._what} at this server, and a user or network with fewer of them "
                "needed this slot; continue at another server"
            ) from None
        finally:
            self._occupants.discard(occupant)
