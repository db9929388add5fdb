"""Gives results to sinks, and tells each sink once when a group of them is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvstore.errors import NotLeader, OutcomeUnknown, StoreError
from kvstore.partition.commands import Result, Sink
from kvstore.types import PartitionId

Reply = tuple[Sink, int, Result]
"""Sink, token, result."""


class Answers:
    """The sinks that have got something since the last `flush`."""

    def __init__(self) -> None:
        self.given = 0
        self._sinks: dict[int, Sink] = {}

    def give(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        self.given += 1
        self._sinks[id(sink)] = sink
        sink.complete(token, result)

    def give_all(self, replies: list[Reply]) -> None:
        """The same for many; the results of one sink mostly stand together."""
        self.given += len(replies)
        last: Sink | None = None
        for sink, token, result in replies:
            if sink is not last:
                self._sinks[id(sink)] = last = sink
            sink.complete(token, result)

    def flush(self) -> None:
        """Tell the sinks to send what they have."""
        while self._sinks:
            sinks, self._sinks = self._sinks, {}
            for sink in sinks.values():
                sink.flush()


class Once:
    """A sink for one operation that this program itself waits for."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Result | StoreError) -> None:
        if self.done.done():
            return
        if isinstance(result, StoreError):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def flush(self) -> None:
        """There is nobody to send to."""


def lost(replies: Iterable[Reply], partition: PartitionId) -> list[Reply]:
    """What to answer when an entry in flight was lost from sight: what it would have done may be done. What it had
    refused is not done in any case."""
    return [
        (
            sink,
            token,
            NotLeader(partition)
            if isinstance(result, StoreError)
            else OutcomeUnknown(f"partition {partition}: the leader was lost before the write was acknowledged"),
        )
        for sink, token, result in replies
    ]
