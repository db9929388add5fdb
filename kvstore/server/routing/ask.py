"""One operation whose caller awaits the result: the sink behind it. A caller with many under way is a sink itself."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.errors import NotCaughtUp, StoreError
from kvstore.partition.state.commands import Level, Op, Result, Sink
from kvstore.partition.state.traits import LEVEL_AT
from kvstore.server.routing.backend import Submits
from kvstore.types import PartitionId


async def ask(backend: Submits, op: Op, partition: PartitionId | None = None, ring_version: int = 0) -> Any:
    """The result of one operation. Raises StoreError. A caller that is cancelled misses the result; a write goes on,
    and a read that has not begun does not."""
    answer = _Answer()
    backend.submit((op,), answer, (0,), ring_version, partition)
    result = await answer.given
    if isinstance(result, StoreError):
        raise result
    return result


async def ask_session(backend: Submits, op: Op, partition: PartitionId | None = None, ring_version: int = 0) -> Any:
    """The same for a caller who knows of one server alone: where the replica has not applied all of his session yet,
    the leader is asked, which has everything. Scans name the partition."""
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
        """The caller is woken by itself."""
