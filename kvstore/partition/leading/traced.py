"""Traces a sampled operation: the sink that ends its span, and the spans of the entry that contains it."""

from __future__ import annotations

from kvstore.env.traces import Traces, TraceSpan
from kvstore.errors import StoreError
from kvstore.partition.leading.entry_in_flight import EntryInFlight
from kvstore.partition.state.commands import Result, Sink
from kvstore.types import PartitionId, Position

SPANS_MAX = 16
"""Maximum number of sampled operations of one entry that get spans below the leader."""


class TracedSink(Sink):
    """A sink that passes one operation's result on and ends the operation's trace span."""

    def __init__(self, sink: Sink, span: TraceSpan) -> None:
        self.sink, self.span = sink, span
        self.leg: TraceSpan | None = None
        """The span of the operation's forwarding to another server, while it is in progress."""

    @property
    def line(self) -> object:
        return self.sink.line

    @property
    def is_gone(self) -> bool:
        return self.sink.is_gone

    def begin_leg(self, server: str) -> str:
        """Begin the span of forwarding the operation to another server, and end any earlier such span. Returns the
        traceparent for the other server's spans."""
        self._end_leg("sent again")
        self.leg = self.span.child("link", server=server)
        return self.leg.traceparent

    def complete(self, token: int, result: Result | StoreError) -> None:
        self.end(type(result).__name__ if isinstance(result, StoreError) else "")
        self.sink.complete(token, result)

    def flush(self) -> None:
        self.sink.flush()

    def end(self, error: str) -> None:
        """End the spans. An error is recorded by the name of its class, because its text may contain keys."""
        self._end_leg(error)
        self.span.end(error=error)

    def _end_leg(self, error: str) -> None:
        if self.leg is not None:
            self.leg.end(error=error)
            self.leg = None


def traced_step(parent: Sink, sink: Sink, step: str, partition: PartitionId) -> Sink:
    """Return a sink that passes results on to `sink` and ends the span of one step of the operation whose result
    `parent` receives. Returns `sink` if that operation is not sampled."""
    return TracedSink(sink, parent.span.child(step, partition=partition)) if isinstance(parent, TracedSink) else sink


def trace_entry(
    traces: Traces, partition: PartitionId, entry: EntryInFlight, position: Position, sent_at: float, now: float
) -> None:
    """Record the spans of an entry that is acknowledged and applied at `now`, for its sampled operations: at the leader
    from their arrival, and within that in the log, with a child span for each bookie."""
    spans = [sink.span for sink, _, _ in entry.replies if isinstance(sink, TracedSink)]
    for span in spans[:SPANS_MAX]:
        arrived = min(max(span.began_s, entry.arrived), sent_at)
        leader = span.child("leader", arrived, partition=partition, operations=len(entry.replies))
        append = leader.child("log append", sent_at, ledger=position.ledger, entry=position.entry)
        traces.acknowledged(append, position.ledger, position.entry, sent_at)
        append.end(now)
        leader.end(now)
