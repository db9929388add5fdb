"""The spans of a node with tracing: which operations are sampled, and their form for OpenTelemetry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, Tracer, set_span_in_context
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace.status import Status, StatusCode

from kvstore.env import Clock
from kvstore.env.slow_log import hash_of
from kvstore.env.traces import COUNTS, Traces, TraceSpan
from kvstore.partition.state.commands import Code, Op
from kvstore.server.tracing.export import ExportQueue
from kvstore.server.tracing.parents import Parent, parse, spell

ENTRIES_MAX = 256
"""Maximum number of entries whose bookies' answers are kept at once."""
LATE_S = 1.0
"""Time in seconds after an entry's acknowledgement for which the slowest bookie's answer is awaited."""
PER_SECOND_MAX = 500
"""Maximum number of operations sampled in one second. Callers that declare every operation as sampled get no more."""


@dataclass(slots=True)
class _Entry:
    """One entry on its way to the bookies."""

    noted_at: float
    stored: list[tuple[str, float]]
    """Bookies that have stored the entry, and the times."""
    appends: list[tuple[TraceSpan, float]]
    """The spans that wait for the answers, and the times at which the entry was sent."""


class NodeTraces(Traces):
    """The traces of one node. They end with `close`."""

    is_on = True

    def __init__(
        self, node: str, clock: Clock, random: Random, exporter: SpanExporter, sample_ratio: float, version: str = ""
    ) -> None:
        self._now, self._date_ms, self._random = clock.now, clock.date_ms, random
        self._log_of_rest = math.log1p(-sample_ratio) if 0 < sample_ratio < 1 else 0.0
        self._ratio = sample_ratio
        self._queue = ExportQueue(exporter)
        about = {"service.name": "kvstore", "service.instance.id": node, "service.version": version}
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # the caller that begins a span has already decided that
            resource=Resource.create(about),
            id_generator=_Ids(random),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._queue)
        self.tracer: Tracer = provider.get_tracer("kvstore")
        self.live = self._spans = 0
        self.sampled = self.left_out = 0
        self._second, self._in_second = -1, 0
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._until_next = self._gap()

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def next_among(self, count: int) -> int:
        """Return the index of the next operation to sample among the `count` operations that are submitted now. A
        result of `count` or more means that none of them is sampled. The caller must report unsampled operations
        with `pass_over`."""
        return self._until_next if self._until_next < count else count

    def pass_over(self, count: int) -> None:
        """Record that `count` operations were not sampled."""
        self._until_next -= count

    def sample(self, endpoint: str, op: Op) -> TakenSpan | None:
        """Begin a trace with this operation, which is the next one to sample. Return None if the current second
        already has too many sampled operations."""
        self._until_next = self._gap()
        return self.begin(f"{endpoint} {name_of(op)}", None, SpanKind.SERVER, **_about(op))

    def serve(self, name: str, traceparent: str, **attributes: str | int) -> TakenSpan | None:
        parent = parse(traceparent)
        return self.begin(name, parent, SpanKind.SERVER, **attributes) if parent and parent.is_sampled else None

    def begin(self, name: str, parent: Parent | None, kind: SpanKind, **attributes: str | int) -> TakenSpan | None:
        """Begin this node's first span of a trace. Return None if the current second already has too many sampled
        operations."""
        now = self._now()
        if math.floor(now) != self._second:
            self._second, self._in_second = math.floor(now), 0
        self._in_second += 1
        if self._in_second > PER_SECOND_MAX:
            self.left_out += 1
            return None
        self.sampled += 1
        context = None
        if parent is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            remote = SpanContext(parent.trace, parent.span, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(remote))
        zero_ns = self._date_ms() * 1_000_000 - int(now * 1e9)
        started = self.tracer.start_span(name, context, kind, attributes, start_time=zero_ns + int(now * 1e9))
        return TakenSpan(self, started, now, zero_ns)

    def _gap(self) -> int:
        """Return the number of operations to skip before the next sampled one. The number is random, as if each
        operation were sampled independently."""
        if self._ratio >= 1:
            return 0
        if self._ratio <= 0:
            return 1 << 62
        return int(math.log1p(-self._random.random()) / self._log_of_rest)

    # ── bookies ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def stored(self, ledger: int, entry: int, bookie: str) -> None:
        now = self._now()
        self._drop_late(now)
        found = self._entries.get((ledger, entry))
        if found is None:
            if not self._spans:
                return  # called for other entries until the last kept entry is dropped
            found = self._keep(ledger, entry, now)
        found.stored.append((bookie, now))
        for append, sent_s in found.appends:
            append.child("bookie add", sent_s, bookie=bookie).end(now)

    def acknowledged(self, span: TraceSpan, ledger: int, entry: int, sent_s: float) -> None:
        found = self._entries.get((ledger, entry)) or self._keep(ledger, entry, self._now())
        for bookie, at in found.stored:
            span.child("bookie add", sent_s, bookie=bookie).end(at)
        found.appends.append((span, sent_s))

    def _keep(self, ledger: int, entry: int, now: float) -> _Entry:
        if len(self._entries) >= ENTRIES_MAX:
            self._drop_oldest()
        found = self._entries[ledger, entry] = _Entry(now, [], [])
        self.live += 1
        return found

    def _drop_late(self, now: float) -> None:
        """Drop the entries for which the slowest bookie has taken too long."""
        while self._entries and now - next(iter(self._entries.values())).noted_at > LATE_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self._entries[next(iter(self._entries))]
        self.live -= 1

    def count(self, spans: int) -> None:
        """Add `spans` to the number of open spans. A negative number counts ended spans."""
        self._spans += spans
        self.live += spans

    # ── other ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        return self._now()

    def statistics(self) -> dict[str, int]:
        queue = self._queue
        values = (self.sampled, self.left_out, queue.exported, queue.dropped, queue.refused)
        return dict(zip(COUNTS, values, strict=True))

    def close(self) -> None:
        """Send the ended spans. Blocks for at most export.CLOSE_S seconds."""
        self._queue.close()


class TakenSpan:
    """A span that is recorded and exported to OpenTelemetry."""

    __slots__ = ("_is_over", "_span", "_traces", "_zero_ns", "began_s")

    def __init__(self, traces: NodeTraces, span: OtelSpan, began_s: float, zero_ns: int) -> None:
        """`zero_ns`: the date at which the node's clock was 0. It is equal for all spans of a trace on this node, so
        that a corrected date puts no span before its parent."""
        self._traces, self._span, self.began_s, self._zero_ns = traces, span, began_s, zero_ns
        self._is_over = False
        traces.count(1)

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return spell(context.trace_id, context.span_id)

    def child(self, name: str, began_s: float | None = None, **attributes: str | int) -> TakenSpan:
        traces = self._traces
        began = traces.now() if began_s is None else began_s
        kind = SpanKind.CLIENT if name == "link" else SpanKind.INTERNAL
        start = self._zero_ns + int(began * 1e9)
        inner = traces.tracer.start_span(name, set_span_in_context(self._span), kind, attributes, start_time=start)
        return TakenSpan(traces, inner, began, self._zero_ns)

    def child_of_call(self, op: Op) -> TakenSpan:
        """Begin the span of one operation of a call."""
        return self.child(name_of(op), None, **_about(op))

    def end(self, ended_s: float | None = None, error: str = "") -> None:
        if self._is_over:
            return
        self._is_over = True
        self._traces.count(-1)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        ended = self._traces.now() if ended_s is None else ended_s
        self._span.end(self._zero_ns + int(ended * 1e9))


class _Ids(IdGenerator):
    """Identifiers drawn from the node's own random generator."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def generate_span_id(self) -> int:
        return int.from_bytes(self._random.randbytes(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(self._random.randbytes(16), "big") or 1


def name_of(op: Op) -> str:
    """Return the name of an operation for a span."""
    return Code(op.code).name


def _about(op: Op) -> dict[str, str | int]:
    """Return the hash of the operation's key, as in the slow log."""
    key = op.key
    return {"key": hash_of(key)} if isinstance(key, bytes) and key else {}
