"""Operations for callers that await one result: the sink behind them. For rare operations; hot paths are sinks
themselves."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.errors import StoreError
from kvstore.partition.commands import Op, Result
from kvstore.server.backend import Backend
from kvstore.types import PartitionId


class Asks:
    """Bounded by what its callers have under way: one entry each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._begun = 0

    async def ask(self, op: Op, partition: PartitionId | None = None) -> Any:
        """The result of one operation. Raises StoreError. A caller that is cancelled misses the result; the operation
        goes on."""
        self._begun += 1
        token = self._begun
        waiter = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            self._backend.submit(op, self, token, 0, partition)
            result = await waiter
        finally:
            del self._waiting[token]
        if isinstance(result, StoreError):
            raise result
        return result

    def complete(self, token: int, result: Result | StoreError) -> None:
        waiter = self._waiting.get(token)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    def flush(self) -> None:
        """Each caller is woken by itself."""
