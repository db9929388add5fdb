"""Sampled operations on a link: the parents of their spans travel in a call ahead of the frame with the operations.

    partition "traces", method "expect", body := MessagePack of [[number of the operation, traceparent], ...]

A server without tracing, or an older one, has no handler for that partition. It answers so, and does the operations
like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.env.traces import Traces
from kvstore.errors import InvalidRequest, Moved, NotLeader
from kvstore.partition.leading.traced import TracedSink
from kvstore.partition.state.commands import Code, Op
from kvstore.server.peer.frames import Call, Lane
from kvstore.server.routing.flight import Flight
from kvstore.server.routing.pending import PeerSink
from kvstore.types import PartitionId

TRACES = PartitionId("traces")
EXPECT = "expect"
ANNOUNCED_MAX = 64
"""Maximum number of sampled operations per frame whose spans continue at the other server."""
EXPECTED_MAX = 1_024
"""Maximum number of parent spans that one link stores for announced operations that have not been executed yet."""

_Parents = Annotated[
    list[tuple[Annotated[int, Meta(ge=0)], Annotated[str, Meta(max_length=128)]]], Meta(max_length=ANNOUNCED_MAX)
]
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Parents)


def announced(flight: Flight, lanes: list[Lane]) -> Call | None:
    """Begin the network spans of the sampled operations in a frame that is about to be sent. Return the call that
    announces these operations to the other server, or None if there are none."""
    found = list(islice(_sampled(flight, lanes), ANNOUNCED_MAX))
    if not found:
        return None
    parents = [(number, sink.begin_leg(flight.server)) for number, sink in found]
    return Call(flight.next_number(), TRACES, EXPECT, _encoder.encode(parents))


def _sampled(flight: Flight, lanes: list[Lane]) -> Iterator[tuple[int, TracedSink]]:
    for lane in lanes:
        for column in (lane.gets, lane.puts, lane.others):
            for number, _ in column:
                in_flight = flight.pending.get(number)
                if in_flight is not None and isinstance(in_flight[1].sink, TracedSink):
                    yield number, in_flight[1].sink


def expected(body: bytes, before: dict[int, str]) -> dict[int, str]:
    """Return the parent spans by operation number: those that `body` announces, and those in `before`, which belong
    to operations that have not arrived yet. Above EXPECTED_MAX, the oldest are dropped. Raises InvalidRequest."""
    try:
        parents = {**before, **dict(_decoder.decode(body))}
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"expected numbers of operations and traceparents: {error}") from error
    return dict(islice(parents.items(), max(0, len(parents) - EXPECTED_MAX), None))


def sink_of(connection: PeerSink, op: Op, number: int, parents: dict[int, str], traces: Traces) -> PeerSink:
    """Return the sink for an operation that has arrived. The sink has a span if the operation was announced and this
    server samples it too."""
    parent = parents.pop(number, None)
    span = traces.serve(f"peer {Code(op.code).name}", parent) if parent is not None else None
    return TracedPeerSink(connection, span) if span is not None else connection


class TracedPeerSink(TracedSink, PeerSink):
    """The sink of a sampled operation that another server sent."""

    sink: PeerSink

    def reject(self, op: Op, token: int, error: NotLeader | Moved) -> None:
        self.end(type(error).__name__)
        self.sink.reject(op, token, error)
