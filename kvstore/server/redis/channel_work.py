"""Spreads the work of Pub/Sub over turns of the event loop.

One message may have 10,000 subscribers, and one pipeline thousands of messages, while leases of 400 ms are renewed by
the same event loop. So work is counted, in units of about a microsecond. When a turn has TURN_WORK of it, later
messages and subscriptions wait: a client's commands in its connection, and messages of other servers in their call.
Messages are sent to subscribers in jobs, whose work counts when the message is published. So nothing is published
faster than it is sent, and the messages on their way take little memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

TURN_WORK = 2_000
"""Work of one turn of the event loop. The last message or subscription of a turn may exceed it."""

Job = Callable[[], int]
"""Does work that has been counted, and returns its amount."""


class Waiter(Protocol):
    """A connection or call that waits until more work may begin."""

    def resume(self) -> None:
        """Continue, or wait again."""
        ...


class ChannelWork:
    """The work of Pub/Sub at one server."""

    def __init__(self) -> None:
        self._owed = 0
        """Work that was done or promised and that no turn has accounted for."""
        self._jobs: dict[Job, None] = {}
        self._waiting: dict[Waiter, None] = {}
        self._is_due = False

    @property
    def is_busy(self) -> bool:
        """True if no more work may begin in this turn."""
        return self._owed >= TURN_WORK

    def add(self, work: int) -> None:
        """Count work that was done in this turn, or that a job will do."""
        self._owed += work
        self._take_turn_soon()

    def soon(self, job: Job, work: int) -> None:
        """Run the job in a later turn, once, even if this is called again before it runs. Counts its work."""
        if job not in self._jobs:
            self._jobs[job] = None
            self.add(work)

    def wait(self, waiter: Waiter) -> None:
        """Resume the waiter when more work may begin, after those that wait already."""
        self._waiting[waiter] = None
        self._take_turn_soon()

    def forget(self, waiter: Waiter) -> None:
        self._waiting.pop(waiter, None)

    async def wait_free(self) -> None:
        """Wait until more work may begin."""
        while self.is_busy:
            call = _Call()
            self.wait(call)
            try:
                await call.resumed
            finally:
                self.forget(call)

    def _take_turn_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._is_due = False
        done = 0
        try:
            while self._jobs and done < TURN_WORK:
                job = next(iter(self._jobs))
                del self._jobs[job]
                done += job()
        finally:
            self._owed = max(0, self._owed - TURN_WORK)
            if self._owed or self._jobs:
                self._take_turn_soon()
        while self._waiting and not self.is_busy:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            waiter.resume()


class _Call:
    """A coroutine that waits."""

    def __init__(self) -> None:
        self.resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        if not self.resumed.done():
            self.resumed.set_result(None)
