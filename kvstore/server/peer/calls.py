"""The calls between replicas on one link: limits their number and matches answers to calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import OutcomeUnknown, Overloaded, StoreError
from kvstore.partition.election.peer_replicas import HOLD
from kvstore.server.peer import frames
from kvstore.server.peer.frames import Answer, Call, FrameError
from kvstore.types import PartitionId, ServerId

CALLS_MAX = 64
"""Maximum number of concurrent calls between replicas on one link. Operations do not count."""
HOLDS_MAX = 1_024
"""Maximum number of calls that a leader answers only when its leadership ends. Each partition that is followed here
and led there has one such call, so there are at most as many as a ring can have partitions. They have their own
limit because they would otherwise leave no capacity for other calls."""


class LinkCalls:
    """The calls on one link to `server`. `write` sends a frame, and `next_number` returns the number of the next
    call."""

    def __init__(self, server: ServerId, write: Callable[[bytes], None], next_number: Callable[[], int]) -> None:
        self._server, self._write, self._next_number = server, write, next_number
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._holds = 0
        """Number of calls in progress that the other side holds until a leadership ends."""

    async def make(self, partition: PartitionId, method: str, body: bytes, timeout_s: float) -> bytes:
        """Send a call and return its answer. Raises Overloaded, OutcomeUnknown, and the error that the other side
        raised."""
        is_hold = method == HOLD
        in_flight, most = (self._holds, HOLDS_MAX) if is_hold else (len(self._answers) - self._holds, CALLS_MAX)
        if in_flight >= most:
            raise Overloaded(f"expected at most {most} concurrent calls to {self._server}; retry")
        self._holds += is_hold
        number = self._next_number()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[number] = answer
        timer = loop.call_later(timeout_s, self._time_out, answer, method, timeout_s)
        try:
            self._write(frames.encode(Call(number, partition, method, body)))
            return await answer
        finally:
            timer.cancel()
            del self._answers[number]
            self._holds -= is_hold

    def take(self, answer: Answer) -> None:
        """Complete the call that this frame answers, if the caller still waits. Raises FrameError."""
        waiter = self._answers.get(answer.number)
        if waiter is None or waiter.done():
            return
        if answer.error is None:
            waiter.set_result(answer.body)
        elif isinstance(answer.error, StoreError):
            waiter.set_exception(answer.error)
        else:
            raise FrameError("expected an error in the answer, got another value")

    def _time_out(self, answer: asyncio.Future[bytes], method: str, timeout_s: float) -> None:
        if not answer.done():
            answer.set_exception(OutcomeUnknown(f"{self._server} did not answer {method} within {timeout_s} s"))

    def are_answered(self) -> bool:
        """Return True if the other side has answered every call."""
        return all(answer.done() for answer in self._answers.values())

    def lose(self) -> None:
        """Fail all unanswered calls, because the link was lost."""
        for waiter in self._answers.values():
            if not waiter.done():
                waiter.set_exception(OutcomeUnknown(f"the link to {self._server} broke before it answered"))
