"""Calls that bring a parent along: gRPC's by their metadata, HTTP's by a header. Each is a span, and so are the
operations that it asks for, below it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc
from aiohttp import hdrs, web
from opentelemetry.trace import SpanKind

from kvstore.partition.state.commands import Op, Sink
from kvstore.server.routing.backend import Backend
from kvstore.server.tracing.backend import TracedBackend
from kvstore.server.tracing.parents import Parent, parent_of
from kvstore.server.tracing.spans import NodeTraces, TakenSpan
from kvstore.types import PartitionId

OPERATIONS_MAX = 64
"""Operations of one call that get spans."""
PAGES = ("", "v1", "ui", "healthz", "readyz", "clusterz", "metrics", "heartbeat", "api")
"""First parts of paths at the HTTP door."""
OTHER = "(other)"


class TracedCall:
    """One call with a parent; a Choice, of its operations."""

    def __init__(self, span: TakenSpan | None) -> None:
        """None: its parent is not sampled, so nothing of it is."""
        self.span = span
        self._room = OPERATIONS_MAX if span is not None else 0

    def next_among(self, count: int) -> int:
        return 0 if self._room else count

    def pass_over(self, count: int) -> None:
        """It has no share to keep."""

    def begin(self, op: Op) -> TakenSpan | None:
        self._room -= 1
        return self.span.child_of_call(op) if self.span is not None else None

    def end(self, error: str = "") -> None:
        if self.span is not None:
            self.span.end(error=error)


_call: ContextVar[TracedCall | None] = ContextVar("call", default=None)
"""Only looked at where a call begins, in its own task: callbacks that a call sets off inherit it, and are others'."""


def backend_of_call(backend: Backend) -> Backend:
    """Return the backend as the present call is to use it: with a parent, its operations are sampled as that one is."""
    call = _call.get()
    if call is None:
        return backend
    behind = backend.behind if isinstance(backend, TracedBackend) else backend
    return TracedBackend(behind, call)


class CallsBackend(TracedBackend):
    """A Backend for a door that submits operations in the tasks of their calls alone: those of a call with a parent are
    sampled as that one is, all others by ratio."""

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
    """Takes the parents of gRPC's calls with one answer; streams of operations have none for each."""

    def __init__(self, traces: NodeTraces) -> None:
        self._traces = traces

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.stream_unary is None:  # as calls with one request are too, from Guarded
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
    """Takes the parents of HTTP's requests."""

    def __init__(self, traces: NodeTraces) -> None:
        self._traces = traces

    async def answer(
        self, request: web.BaseRequest, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        parent = parent_of((name.lower(), value) for name, value in request.headers.items())
        if parent is None:
            _call.set(None)
            return await answer(request)
        call = begin_call(self._traces, _name_of(request), parent)
        error = "failed"
        try:
            response = await answer(request)
            error = "" if response.status < 500 else str(response.status)
            return response
        finally:
            call.end(error)


def _name_of(request: web.BaseRequest) -> str:
    """The method and the first part of the path: what stands behind may be a key. Who asks has not been asked yet who
    he is: a word of his own is no name."""
    page = request.path.strip("/").split("/", 1)[0]
    method = request.method if request.method in hdrs.METH_ALL else OTHER
    return f"{method} /{page}" if page in PAGES else f"{method} {OTHER}"


def begin_call(traces: NodeTraces, name: str, parent: Parent) -> TracedCall:
    """Begin the call that the present task answers."""
    call = TracedCall(traces.begin(name, parent, SpanKind.SERVER) if parent.is_sampled else None)
    _call.set(call)
    return call
