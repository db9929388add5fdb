"""Gives results to sinks, and tells each sink once when a group of them is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvstore.errors import InvalidRequest, Moved, NotLeader, OutcomeUnknown, StoreError
from kvstore.partition.state.commands import Code, Op, Reply, Result, Sink
from kvstore.partition.state.state import State
from kvstore.types import PartitionId, Position

TurnAway = Callable[[Op, Sink, int, Moved], None]


class Answers:
    """Gives results to sinks that are told together."""

    def __init__(self) -> None:
        self.given = 0
        self.refused = 0
        self.turn_away_by: TurnAway | None = None
        """Takes what belongs to another partition, to send it there; without it the sink is told."""
        self.sinks: dict[int, Sink] = {}
        """Sinks that have got something since the last `flush`."""
        self.refusals: list[Reply] = []
        """For `give_refusals`."""

    def refuse(self, sink: Sink, token: int, error: StoreError) -> None:
        """Give the error by `give_refusals`: no sink hears anything from inside `submit`."""
        self.refused += 1
        self.refusals.append((sink, token, error))

    def give_refusals(self) -> None:
        refusals, self.refusals = self.refusals, []
        self.give_all(refusals)

    def give(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        self.given += 1
        self.sinks[id(sink)] = sink
        sink.complete(token, result)

    def give_all(self, replies: list[Reply]) -> None:
        """The same for many; the results of one sink mostly stand together."""
        count = len(replies)
        self.given += count
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
        """The same error for many."""
        for _, sink, token in items:
            self.give(sink, token, error)

    def turn_away(self, op: Op, sink: Sink, token: int, moved: Moved) -> None:
        """The operation is another partition's."""
        if self.turn_away_by is None:
            self.give(sink, token, moved)
        else:
            self.turn_away_by(op, sink, token, moved)

    def turn_away_all(self, items: Iterable[tuple[tuple[Op, Sink, int], Moved]]) -> None:
        for (op, sink, token), moved in items:
            self.turn_away(op, sink, token, moved)

    def flush(self) -> None:
        """Tell the sinks to send what they have."""
        while self.sinks:
            sinks, self.sinks = self.sinks, {}
            for sink in sinks.values():
                sink.flush()


class Soon:
    """Gives results on the next turn of the event loop: no sink is called from inside the call that gives it a
    result."""

    def __init__(self) -> None:
        self._results: list[Reply] = []

    def give(self, sink: Sink, token: int, result: Result | StoreError) -> None:
        """Complete the operation on the next turn of the event loop, in the order of these calls."""
        if not self._results:
            asyncio.get_running_loop().call_soon(self._tell)
        self._results.append((sink, token, result))

    def _tell(self) -> None:
        answers, results = Answers(), self._results
        self._results = []
        answers.give_all(results)
        answers.flush()


class Once(Sink):
    """A sink for one operation that this program itself waits for."""

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
        """Nothing is sent."""


class Logged(Sink):
    """A sink for a record of the log: its position, taken in the step in which it is applied."""

    def __init__(self, state: State) -> None:
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
        """Nothing is sent."""


def lost(replies: Iterable[Reply], partition: PartitionId) -> list[Reply]:
    """The answers when an entry in flight was lost from sight: what it would have done may be done. What it had
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


def unknown_code(code: int) -> InvalidRequest:
    return InvalidRequest(f"want an operation code from 1 to {max(Code)}, got {code}")


def malformed(op: Op, error: Exception) -> InvalidRequest:
    """Make the error for an operation whose decision has raised another."""
    return InvalidRequest(f"malformed operation {op[0]}: {error!r}")
