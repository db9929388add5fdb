"""Operations that are refused where nobody expects an answer yet: each is told on the next turn of the event loop."""

from __future__ import annotations

import asyncio

from kvstore.errors import StoreError
from kvstore.partition.commands import Sink


class Failures:
    """A sink is never called from inside the call that gave it."""

    def __init__(self) -> None:
        self._failures: list[tuple[Sink, int, StoreError]] = []

    def add(self, sink: Sink, token: int, error: StoreError) -> None:
        """Complete the operation with `error`, soon, and in the order of these calls."""
        if not self._failures:
            asyncio.get_running_loop().call_soon(self._tell)
        self._failures.append((sink, token, error))

    def _tell(self) -> None:
        failures, self._failures = self._failures, []
        sinks: dict[int, Sink] = {}
        for sink, token, error in failures:
            sink.complete(token, error)
            sinks[id(sink)] = sink
        for sink in sinks.values():
            sink.flush()
