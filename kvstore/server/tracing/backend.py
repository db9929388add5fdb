"""A backend that samples operations and begins their traces. It is used only if tracing is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.partition.leading.traced import TracedSink
from kvstore.partition.state.commands import NOT_NOW, Code, NotNow, Op, Sink
from kvstore.server.cluster.topology import ClusterTopology
from kvstore.server.routing.backend import Backend
from kvstore.server.tracing.spans import NodeTraces, TakenSpan
from kvstore.types import PartitionId

_GET = int(Code.GET)


class Sampler(Protocol):
    """Chooses the operations that are sampled."""

    def next_among(self, count: int) -> int:
        """Return the index of the next sampled operation among the `count` operations that are submitted now. Return
        `count` if none of them is sampled."""
        ...

    def pass_over(self, count: int) -> None:
        """Record that `count` operations were not sampled."""
        ...

    def begin(self, op: Op) -> TakenSpan | None:
        """Begin the span of the next sampled operation. Return None if the operation gets no span after all."""
        ...


class ByRatio:
    """Samples a fraction of the operations at one endpoint. Each sampled operation begins a trace."""

    def __init__(self, traces: NodeTraces, endpoint: str) -> None:
        self._traces, self._endpoint = traces, endpoint
        self.next_among, self.pass_over = traces.next_among, traces.pass_over

    def begin(self, op: Op) -> TakenSpan | None:
        return self._traces.sample(self._endpoint, op)


class TracedBackend:
    """A Backend that samples operations before it passes them to another Backend."""

    def __init__(self, backend: Backend, choice: Sampler) -> None:
        self.behind, self._choice = backend, choice
        self.progress = backend.progress

    @property
    def topology(self) -> ClusterTopology:
        return self.behind.topology

    def on_topology(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self.behind.on_topology(changed)

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        """Submit the operations. The operations between two sampled ones are passed on in one call."""
        while ops:
            place = self._choice.next_among(len(ops))
            if place:
                self._choice.pass_over(place)
                self.behind.submit(ops[:place], sink, tokens[:place], ring_version, partition)
            if place < len(ops):
                span = self._choice.begin(ops[place])
                traced = sink if span is None else TracedSink(sink, span)
                self.behind.submit(ops[place : place + 1], traced, tokens[place : place + 1], ring_version, partition)
            ops, tokens = ops[place + 1 :], tokens[place + 1 :]

    def read_now(self, keys: list[bytes]) -> list[bytes | None] | NotNow:
        """Return NOT_NOW if one of the reads is to be sampled, because a sampled read must be submitted. Otherwise
        return what the other Backend returns."""
        if self._choice.next_among(len(keys)) < len(keys):
            return NOT_NOW
        rows = self.behind.read_now(keys)
        if rows is not NOT_NOW:
            self._choice.pass_over(len(keys))
        return rows
