"""Traces calls that have a parent span: gRPC calls name it in their metadata, and HTTP requests in a header. Each
call gets a span, and the operations that it submits get spans below it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from http import HTTPMethod
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from kvstore.partition.state.commands import Op, Sink
from kvstore.rpc.http.messages import HttpRequest
from kvstore.server.routing.backend import Backend
from kvstore.server.tracing.backend import TracedBackend
from kvstore.server.tracing.parents import Parent, parent_of
from kvstore.server.tracing.spans import NodeTraces, TakenSpan
from kvstore.types import PartitionId

OPERATIONS_MAX = 64
"""Maximum number of operations of one call that get spans."""
PAGES = ("", "v1", "ui", "healthz", "readyz", "clusterz", "metrics", "heartbeat", "api")
"""First segments of paths on the HTTP port."""
METHODS = frozenset(each.value for each in HTTPMethod)
OTHER = "(other)"


class TracedCall:
    """One call that has a parent span, and the Sampler of the call's operations."""

    def __init__(self, span: TakenSpan | None) -> None:
        """`span` is None if the parent is not sampled. Then nothing in the call is sampled."""
        self.span = span
        self._left = OPERATIONS_MAX if span is not None else 0

    def next_among(self, count: int) -> int:
        return 0 if self._left else count

    def pass_over(self, count: int) -> None:
        """Do nothing, because a call samples no share."""

    def begin(self, op: Op) -> TakenSpan | None:
        self._left -= 1
        return self.span.child_of_call(op) if self.span is not None else None

    def end(self, error: str = "") -> None:
        if self.span is not None:
            self.span.end(error=error)


_call: ContextVar[TracedCall | None] = ContextVar("call", default=None)
"""Read only where a call begins, in its own task: callbacks that a call schedules inherit it, but belong to other
calls."""


def backend_of_call(backend: Backend) -> Backend:
    """Return the backend for the current call. If the call has a parent span, its operations are sampled if the
    parent is."""
    call = _call.get()
    if call is None:
        return backend
    behind = backend.behind if isinstance(backend, TracedBackend) else backend
    return TracedBackend(behind, call)


class CallsBackend(TracedBackend):
    """A Backend for an endpoint that submits operations only in the tasks of their calls. Operations of a call with
    a parent are sampled like the parent, all others by ratio."""

    def submit(
        self,
        ops: Sequence[Op],
        sink: Sink,
        tokens: Sequence[int],
        ring_version: int = 0,
        partition: PartitionId | None = None,
    ) -> None:
        if _call.get() is None:
            return super().submit(ops, sink, tokens, ring_version, partition)
        backend_of_call(self.behind).submit(ops, sink, tokens, ring_version, partition)


class TracedCalls(grpc.aio.ServerInterceptor):
    """A gRPC interceptor that reads the parent spans of calls with a single response. Operations in streams have no
    separate parents."""

    def __init__(self, traces: NodeTraces) -> None:
        self._traces = traces

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        # Guarded turns calls with one request into stream calls too
        if handler is None or handler.stream_unary is None:
            return handler
        parent = parent_of(handler_call_details.invocation_metadata or ())
        return handler._replace(stream_unary=self._traced(handler.stream_unary, handler_call_details.method, parent))

    def _traced(self, behaviour: Callable[..., Awaitable[Any]], method: str, parent: Parent | None) -> Any:
        async def answer(requests: Any, context: Any) -> Any:
            if parent is None:
                _call.set(None)
                return await behaviour(requests, context)
            call = begin_call(self._traces, method.lstrip("/"), parent)
            try:
                return await behaviour(requests, context)
            finally:
                code = context.code()
                call.end("" if code in (None, 0, grpc.StatusCode.OK) else str(getattr(code, "name", code)))

        return answer


class TracedPages:
    """Reads the parent spans of HTTP requests."""

    def __init__(self, traces: NodeTraces) -> None:
        self._traces = traces

    async def answer(self, request: HttpRequest, answer: Callable[[HttpRequest], Awaitable[None]]) -> None:
        """Trace the call of `answer`."""
        parent = parent_of(request.headers)
        if parent is None:
            _call.set(None)
            await answer(request)
            return
        call = begin_call(self._traces, _name_of(request), parent)
        error = "failed"
        try:
            await answer(request)
            error = "" if request.status < 500 else str(request.status)
        finally:
            call.end(error)


def _name_of(request: HttpRequest) -> str:
    """Return the method and the first segment of the path as the name of a span. Later segments are omitted because
    they may contain a key. Only known first segments are used, because the caller is not authenticated yet."""
    page = request.path.strip("/").split("/", 1)[0]
    method = request.method if request.method in METHODS else OTHER
    return f"{method} /{page}" if page in PAGES else f"{method} {OTHER}"


def begin_call(traces: NodeTraces, name: str, parent: Parent) -> TracedCall:
    """Begin a trace for the call that the current task answers."""
    call = TracedCall(traces.begin(name, parent, SpanKind.SERVER) if parent.is_sampled else None)
    _call.set(call)
    return call
