"""Delivers results to sinks, and flushes each sink once for each group of results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Op, Reply, Result, Sink
from kvstore.partition.state.state import ReplicaState
from kvstore.types import PartitionId, Position

Redirect = Callable[[Op, Sink, int, Moved], None]


class ResultDelivery:
    """Delivers results to sinks, and keeps track of the sinks that have to be flushed."""

    def __init__(self) -> None:
        self.delivered = 0
        self.refused = 0
        self.redirect_by: Redirect | None = None
        """Sends an operation whose key belongs to another partition there. If None, the sink receives Moved."""
        self.sinks: dict[int, Sink] = {}
        """Sinks that have received a result since the last `flush`."""
        self.refusals: list[Reply] = []
        """Refusals that the next `deliver_refusals` delivers."""

    def refuse(self, sink: Sink, token: int, error: StoreError) -> None:
        """Queue an error for `deliver_refusals`, because no sink may be called from inside `submit`."""
        self.refused += 1
        self.refusals.append((sink, token, error))

    def deliver_refusals(self) -> None:
        """Deliver the errors queued by `refuse`."""
        refusals, self.refusals = self.refusals, []
        self.deliver_all(refusals)

    def deliver(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        self.delivered += 1
        self.sinks[id(sink)] = sink
        sink.complete(token, result)

    def deliver_all(self, replies: list[Reply]) -> None:
        """Deliver many results. Consecutive results for the same sink are delivered in one call."""
        count = len(replies)
        self.delivered += count
        begin = 0
        while begin < count:
            sink, token, result = replies[begin]
            self.sinks[id(sink)] = sink
            end = begin + 1
            while end < count and replies[end][0] is sink:
                end += 1
            if end == begin + 1:
                sink.complete(token, result)
            else:
                _, tokens, results = zip(*replies[begin:end], strict=True)
                sink.complete_all(tokens, results)
            begin = end

    def fail_all(self, items: Iterable[tuple[Op, Sink, int]], error: StoreError) -> None:
        """Deliver the same error to many operations."""
        for _, sink, token in items:
            self.deliver(sink, token, error)

    def redirect(self, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        """Pass the operation on to the partition that owns its key."""
        if self.redirect_by is None:
            self.deliver(sink, token, moved)
        else:
            self.redirect_by(op, sink, token, moved)

    def redirect_all(self, items: Iterable[tuple[tuple[Op, Sink, int], Moved]]) -> None:
        for (op, sink, token), moved in items:
            self.redirect(op, sink, token, moved)

    def flush(self) -> None:
        """Flush every sink that has received results since the last flush."""
        while self.sinks:
            sinks, self.sinks = self.sinks, {}
            for sink in sinks.values():
                sink.flush()


class NextTurnDelivery:
    """Delivers results on the next turn of the event loop, so that no sink is called from inside the call that produces
    its result."""

    def __init__(self) -> None:
        self._results: list[Reply] = []

    def deliver(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        """Deliver the result on the next turn of the event loop. Results are delivered in the order of the calls."""
        if not self._results:
            asyncio.get_running_loop().call_soon(self._notify)
        self._results.append((sink, token, result))

    def _notify(self) -> None:
        answers, results = ResultDelivery(), self._results
        self._results = []
        answers.deliver_all(results)
        answers.flush()


class SingleResultSink(Sink):
    """A sink for a single operation whose result a task in this process awaits."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @property
    def is_gone(self) -> bool:
        return self.done.done()

    def complete(self, token: int, result: Result | StoreError) -> None:
        if self.done.done():
            return
        if isinstance(result, StoreError):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""


class PositionSink(Sink):
    """A sink that returns the position of a log record. The position is read in the same step in which the record is
    applied."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()

    def complete(self, token: int, result: Result | StoreError) -> None:
        position = self._state.position
        if self.done.done():
            return
        if isinstance(result, StoreError):
            self.done.set_exception(result)
        else:
            assert position is not None
            self.done.set_result(position)

    def flush(self) -> None:
        """Do nothing, because nothing is sent."""


def lost(replies: Iterable[Reply], partition: PartitionId) -> list[Reply]:
    """Return the replies for an entry in flight whose fate is unknown. The entry may still be applied later, so the
    outcome of its effects is unknown. Operations that the entry refused have definitely not been done."""
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


def malformed(op: Op, error: Exception) -> InvalidRequest:
    """Return the error for an operation whose evaluation raised an unexpected exception."""
    return InvalidRequest(f"malformed operation {op.code}: {error!r}")
