"""Limits and completes the calls between replicas on one link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import OutcomeUnknown, Overloaded, StoreError
from kvstore.partition.election.peer_replicas import HOLD
from kvstore.server.peer import frames
from kvstore.server.peer.frames import Answer, Call, FrameError
from kvstore.types import PartitionId, ServerId

CALLS_MAX = 64
"""Maximum number of calls between replicas in progress on one link, independent of operations."""
HOLDS_MAX = 1_024
"""Maximum number of calls that a leader answers when its leadership ends, in addition to CALLS_MAX: one per partition
that is followed here and led there, at most as many as a ring can have. Counted together, they would leave no capacity
for other calls."""


class LinkCalls:
    """The calls on one link to `server`. `write` sends a frame, `next_number` numbers the calls."""

    def __init__(self, server: ServerId, write: Callable[[bytes], None], next_number: Callable[[], int]) -> None:
        self._server, self._write, self._next_number = server, write, next_number
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._holds = 0
        """Number of calls that are held until a leadership ends."""

    async def make(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Send a call and return its answer. Raises Overloaded, OutcomeUnknown, and what the other side raised."""
        is_hold = method == HOLD
        under_way, most = (self._holds, HOLDS_MAX) if is_hold else (len(self._answers) - self._holds, CALLS_MAX)
        if under_way >= most:
            raise Overloaded(f"expected at most {most} concurrent calls to {self._server}; retry")
        self._holds += is_hold
        number = self._next_number()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[number] = answer
        timer = loop.call_later(timeout_s, self._give_up, answer, method, timeout_s)
        try:
            self._write(frames.encode(Call(number, partition, method, body)))
            return await answer
        finally:
            timer.cancel()
            del self._answers[number]
            self._holds -= is_hold

    def take(self, answer: Answer) -> None:
        """Complete the call that this answers, if it still waits. Raises FrameError."""
        waiter = self._answers.get(answer.number)
        if waiter is None or waiter.done():
            return
        if answer.error is None:
            waiter.set_result(answer.body)
        elif isinstance(answer.error, StoreError):
            waiter.set_exception(answer.error)
        else:
            raise FrameError("expected an error in the answer, got another value")

    def _give_up(self, answer: asyncio.Future[bytes], method: str, timeout_s: float) -> None:
        if not answer.done():
            answer.set_exception(OutcomeUnknown(f"{self._server} did not answer {method} within {timeout_s} s"))

    def are_answered(self) -> bool:
        """Return True if the other side owes no answer."""
        return all(answer.done() for answer in self._answers.values())

    def lose(self) -> None:
        """Fail all calls, because the link broke before they were answered."""
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(OutcomeUnknown(f"the link to {self._server} broke before it answered"))
