"""Submits a single operation and awaits its result. A caller with many operations in progress should implement Sink
itself."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.errors import NotCaughtUp, StoreError
from kvstore.partition.state.commands import Level, Op, Result, Sink
from kvstore.partition.state.traits import LEVEL_AT
from kvstore.server.routing.backend import Submits
from kvstore.types import PartitionId


async def ask(backend: Submits, op: Op, partition: PartitionId | None = None, ring_version: int = 0) -> Any:
    """Submit one operation and return its result. Raises StoreError. If the caller is cancelled, a write still runs
    to its end, but a read that has not started is dropped."""
    answer = _Answer()
    backend.submit((op,), answer, (0,), ring_version, partition)
    result = await answer.given
    if isinstance(result, StoreError):
        raise result
    return result


async def ask_session(backend: Submits, op: Op, partition: PartitionId | None = None, ring_version: int = 0) -> Any:
    """Like `ask`, for a caller that cannot choose another server. If a session read finds that the local replica
    lags behind the session, it is repeated as a linearizable read, which the leader answers. Scans must pass
    `partition`."""
    try:
        return await ask(backend, op, partition, ring_version)
    except NotCaughtUp:
        at = LEVEL_AT.get(op[0])
        if at is None or op[at] != Level.SESSION:
            raise
        linearizable = (*op[:at], int(Level.LINEARIZABLE), *op[at + 1 :])
        return await ask(backend, linearizable, partition, ring_version)


class _Answer(Sink):
    """The sink of one operation."""

    def __init__(self) -> None:
        self.given: asyncio.Future[Result | StoreError] = asyncio.get_running_loop().create_future()

    @property
    def is_gone(self) -> bool:
        return self.given.done()

    def complete(self, token: int, result: Result | StoreError) -> None:
        if not self.given.done():
            self.given.set_result(result)

    def flush(self) -> None:
        """Does nothing, because the future wakes the caller."""
