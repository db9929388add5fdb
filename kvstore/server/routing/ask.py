"""Submits a single operation and awaits its result. A caller with many operations in progress should implement Sink
itself."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec.structs import replace

from kvstore.errors import NotCaughtUp, StoreError
from kvstore.partition.state.commands import Level, Op, Result, Sink
from kvstore.server.routing.backend import Submits
from kvstore.types import PartitionId


async def ask(
    backend: Submits,
    op: Op,
    partition: PartitionId | None = None,
    ring_version: int = 0,
    *,
    within_s: float | None = None,
) -> Any:
    """Submit one operation and return its result. Raises StoreError, and TimeoutError if there is no result within
    `within_s` seconds. If the caller is cancelled or the time is over, a write still runs to its end, but a read that
    has not started is dropped."""
    answer = _Answer()
    backend.submit((op,), answer, (0,), ring_version, partition)
    result = await (answer.given if within_s is None else answer.within(within_s))
    if isinstance(result, StoreError):
        raise result
    return result


async def ask_session(
    backend: Submits,
    op: Op,
    partition: PartitionId | None = None,
    ring_version: int = 0,
    *,
    within_s: float | None = None,
) -> Any:
    """Like `ask`, for a caller that cannot choose another server. If a session read finds that the local replica
    lags behind the session, it is repeated as a linearizable read, which the leader answers. Scans must pass
    `partition`."""
    try:
        return await ask(backend, op, partition, ring_version, within_s=within_s)
    except NotCaughtUp:
        if op.level != Level.SESSION:
            raise
        linearizable = replace(op, level=int(Level.LINEARIZABLE))
        return await ask(backend, linearizable, partition, ring_version, within_s=within_s)


class _Answer(Sink):
    """The sink of one operation."""

    def __init__(self) -> None:
        self.given: asyncio.Future[Result | StoreError] = asyncio.get_running_loop().create_future()

    @property
    def is_gone(self) -> bool:
        return self.given.done()

    async def within(self, seconds: float) -> Result | StoreError:
        """Wait for the result. Raises TimeoutError. A timer of its own costs a third of `asyncio.timeout`."""
        timer = self.given.get_loop().call_later(seconds, self._expire)
        try:
            return await self.given
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if not self.given.done():
            self.given.set_exception(TimeoutError())

    def complete(self, token: int, result: Result | StoreError) -> None:
        if not self.given.done():
            self.given.set_result(result)

    def flush(self) -> None:
        """Does nothing, because the future wakes the caller."""
