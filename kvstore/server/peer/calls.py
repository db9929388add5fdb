"""The calls between replicas that one link has under way: how many there may be, and how each of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import OutcomeUnknown, Overloaded, StoreError
from kvstore.partition.election.peer_replicas import HOLD
from kvstore.server.peer import frames
from kvstore.server.peer.frames import Answer, Call, FrameError
from kvstore.types import PartitionId, ServerId

CALLS_MAX = 64
"""Calls between replicas under way on one link, whatever else is."""
HOLDS_MAX = 1_024
"""Calls that a leader answers when its lead ends, beside CALLS_MAX: one for each partition that is followed here and
led there, so as many as a ring may have. Counted among the others, they would leave these no room."""


class LinkCalls:
    """The calls that one link to `server` carries. `write` sends a frame on it; `next_number` numbers the calls."""

    def __init__(self, server: ServerId, write: Callable[[bytes], None], next_number: Callable[[], int]) -> None:
        self._server, self._write, self._next_number = server, write, next_number
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._holds = 0
        """How many of them are held until a lead ends."""

    async def make(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Send one call and return its answer. Raises Overloaded, OutcomeUnknown, and what the other side raised."""
        is_hold = method == HOLD
        under_way, most = (self._holds, HOLDS_MAX) if is_hold else (len(self._answers) - self._holds, CALLS_MAX)
        if under_way >= most:
            raise Overloaded(f"{most} calls to {self._server} are under way")
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
        """End the call that this answers, if it still waits. Raises FrameError."""
        waiter = self._answers.get(answer.number)
        if waiter is None or waiter.done():
            return
        if answer.error is None:
            waiter.set_result(answer.body)
        elif isinstance(answer.error, StoreError):
            waiter.set_exception(answer.error)
        else:
            raise FrameError("an answer whose error is none")

    def _give_up(self, answer: asyncio.Future[bytes], method: str, timeout_s: float) -> None:
        if not answer.done():
            answer.set_exception(OutcomeUnknown(f"{self._server} did not answer {method} within {timeout_s} s"))

    def are_answered(self) -> bool:
        """Whether the other side owes no answer."""
        return all(answer.done() for answer in self._answers.values())

    def lose(self) -> None:
        """End all of them: the link broke before they were answered."""
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(OutcomeUnknown(f"the link to {self._server} broke before it answered"))
