"""Submissions of simulated clients on their way to a node and back: one operation, or a frame of several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvstore.errors import ConditionFailed, OutcomeUnknown, StoreError, Unavailable
from kvstore.partition.state.commands import NOT_NOW, Code, Get, Level, Op, Result, Sink
from kvstore.partition.state.rows import record_of
from kvstore.ring.ring import Ring
from kvstore.types import PartitionId
from tests.sim.judges.operations import Operation
from tests.sim.judges.probes import declare, probe
from tests.sim.world.loop import Process
from tests.sim.world.network import SimNetwork

declare(
    "client.evaluate_batched",
    "client.read_at_once",
    "client.transact_read_only",
    "client.frame",
    "client.answer_of_a_late_attempt",
)

HELD_POLL_S = 0.05
HELD_MAX_S = 5.0
"""Maximum seconds that a cut link holds data back; data held for longer are lost."""
_LOCAL = (Level.SESSION, Level.STALE)


class EndpointNode(Protocol):
    """A node as its clients see it."""

    name: str

    @property
    def endpoint(self) -> tuple[Process, Any] | None:
        """Return the running process and its Backend, or None if its port refuses connections."""
        ...

    def floor(self, partition: PartitionId) -> int:
        """Return the lowest sequence that a stale or session read answered now by the replica on this node may show."""
        ...


class Answer(NamedTuple):
    """An answer to a client."""

    result: Result
    progress: dict[PartitionId, tuple[int, int]]
    ring: Ring
    floor: int


class Call:
    """One operation of a frame, with the way back of its answer."""

    def __init__(self, frame: Frame, operation: Operation) -> None:
        self.operation = operation
        self.answer: asyncio.Future[Answer] = frame.network.loop.create_future()
        self.floor = 0
        self._frame = frame

    def lost(self, why: str) -> StoreError:
        """Return the error of an operation whose answer will not arrive."""
        return OutcomeUnknown(why) if self.operation.is_write else Unavailable(why)

    def send_back(self, answer: Answer, answered_at: float) -> None:
        """Send the answer to the client."""
        frame = self._frame
        if not frame.network.is_open(frame.back):
            if frame.network.loop.time() - answered_at < HELD_MAX_S:
                frame.later(HELD_POLL_S, self.send_back, answer, answered_at)
            return
        frame.note_returned()
        if self.answer.done():
            probe("client.answer_of_a_late_attempt")
        elif isinstance(answer.result, StoreError) and not is_answer(answer.result):
            self.answer.set_exception(answer.result)
        else:
            self.answer.set_result(answer)

    def fail(self, error: StoreError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Frame(Sink):
    """Operations that a client sends together over one connection. A Sink on the node's side; tokens are indexes."""

    def __init__(
        self, network: SimNetwork, client: str, node: EndpointNode, operations: Sequence[Operation], ring_version: int
    ) -> None:
        self.network = network
        self.calls = [Call(self, each) for each in operations]
        self.back = network.link(node.name, client)
        self._node, self._ring_version = node, ring_version
        self._there = network.link(client, node.name)
        self._sent_at = network.loop.time()
        self._left = len(self.calls)
        endpoint = node.endpoint
        if endpoint is None:
            for call in self.calls:
                self.later(self._there.delay(), call.fail, Unavailable(f"{node.name} refuses connections"))
            return
        self._process, self._backend = endpoint
        self._process.on_death.append(self._died)
        self.later(self._there.delay(), self._arrive)

    def later(self, delay: float, callback: Any, *args: Any) -> None:
        self.network.at(self.network.loop.time() + delay, callback, *args)

    def note_returned(self) -> None:
        """Record that an answer has returned."""
        self._left -= 1
        if not self._left and self._died in self._process.on_death:
            self._process.on_death.remove(self._died)

    # ── on the node ───────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(self, token: int, result: Result | StoreError) -> None:
        """Handle the end of an operation."""
        call = self.calls[token]
        ring, operation = self._backend.topology.ring, call.operation
        asked = {operation.partition, *([ring.partition_of(operation.key)] if operation.is_keyed else [])}
        progress = {each: self._backend.progress(each) for each in sorted(asked)}
        answer = Answer(result, progress, ring, call.floor)
        self.later(self.back.delay(), call.send_back, answer, self.network.loop.time())

    def flush(self) -> None:
        """Do nothing: each answer is sent at once."""

    def _arrive(self) -> None:
        if not self.network.is_open(self._there):
            if self.network.loop.time() - self._sent_at < HELD_MAX_S:
                self.later(HELD_POLL_S, self._arrive)
        elif self._process.alive:
            self.network.loop.call_soon(self._submit, context=self._process.context.copy())

    # docs/protocol.md P18
    def _submit(self) -> None:
        """Submit by the fast paths of the front ends: plain PUTs of a frame together, and plain GETs of a frame with
        nothing else at once. Half of the frames of one operation take the slow path."""
        backend, drawn = self._backend, int(self._sent_at * 1e6)
        ops = [call.operation.op for call in self.calls]
        if self._ring_version <= backend.topology.ring.routed and (drawn & 1 or len(ops) > 1):
            if all(isinstance(op, Get) and not (op.level or op.seq) for op in ops):
                rows = self._backend.read_now([op.key for op in ops])
                if rows is not NOT_NOW:
                    probe("client.read_at_once" if len(ops) == 1 else "client.transact_read_only")
                    for token, row in enumerate(rows):
                        self.complete(token, None if row is None else record_of(row))
                    return
            elif all(op.code == Code.PUT and op.key for op in ops):
                probe("client.evaluate_batched")
                return self._backend.submit(ops, self, range(len(ops)))  # type: ignore[no-any-return]
        if len(ops) > 1:
            probe("client.frame")
        for token, op in enumerate(ops):
            self._submit_one(op, token)

    def _submit_one(self, op: Op, token: int) -> None:
        call = self.calls[token]
        if call.operation.level in _LOCAL and self._ring_version == self._backend.topology.ring.routed:
            call.floor = self._node.floor(call.operation.partition)
        by_key = None if call.operation.is_keyed else call.operation.partition
        self._backend.submit((op,), self, (token,), self._ring_version, by_key)

    def _died(self) -> None:
        """The node's kernel resets the connection. An answer in flight may still arrive before that."""
        delay = self.back.delay()
        for call in self.calls:
            self.later(delay, call.fail, call.lost("connection reset"))


def is_answer(error: StoreError) -> bool:
    """Return True if the error is a failed condition: it is an answer about the state, not a failure."""
    return isinstance(error, ConditionFailed)
