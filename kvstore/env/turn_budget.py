"""Limits the work that the connections of a port begin in one turn of the event loop.

uvloop reads up to 8 MiB of a connection in one turn, and a client may have many connections. If all of that were tiny
requests, they would take seconds, and everything else in the process would wait meanwhile, such as leases of 400 ms.
So requests are counted. After a certain number of them, connections with further ones wait for the next turn, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial


class TurnBudget:
    """The work that all connections of a port may begin until the next turn."""

    def __init__(self, most: int) -> None:
        """`most` is the amount of work after which a turn ends. The last request of a turn may exceed it."""
        self.is_used_up = False
        """True if no more work may begin in this turn."""
        self._most, self._begun = most, 0
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, work: int) -> None:
        """Count work that has begun."""
        self._begun += work
        if self._begun >= self._most and not self.is_used_up:
            self.is_used_up = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    async def begin(self, work: int) -> None:
        """Wait until work may begin, and count it. For a coroutine, in place of `take` and `wait`."""
        while self.is_used_up:
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.wait(partial(_resume, resumed))
            await resumed
        self.take(work)

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` in a later turn, after those that wait already. Call this only if `is_used_up` is True."""
        self._waiting[resume] = None

    def _begin_turn(self) -> None:
        self._begun, self.is_used_up = 0, False
        try:
            while self._waiting and not self.is_used_up:
                resume = next(iter(self._waiting))
                del self._waiting[resume]
                resume()
        finally:
            if self._waiting and not self.is_used_up:  # a connection has failed, and the others must not wait for it
                asyncio.get_running_loop().call_soon(self._begin_turn)


def _resume(resumed: asyncio.Future[None]) -> None:
    if not resumed.done():  # the coroutine may have been cancelled
        resumed.set_result(None)
