"""A trace collector: accepts OTLP over gRPC on loopback like real collectors, and keeps the spans."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Seen(NamedTuple):
    """One received span."""

    node: str
    trace: str
    id: str
    parent: str
    """Id of the parent; empty for the first span of a trace."""
    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    error: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans by their identifiers."""

    def __init__(self) -> None:
        self._spans: dict[str, Seen] = {}

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        for of_node in request.resource_spans:
            about = {each.key: each.value.string_value for each in of_node.resource.attributes}
            for scope in of_node.scope_spans:
                for span in scope.spans:
                    self._spans[span.span_id.hex()] = _seen(about["service.instance.id"], span)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        return list(self._spans.values())

    def trace(self, trace: str) -> list[Seen]:
        return [each for each in self.spans if each.trace == trace]

    def path(self, span: Seen) -> list[str]:
        """Return the span's ancestors from the first one, and the span itself, each as `node name`; a missing one is
        `?`."""
        found = [f"{span.node} {span.name}"]
        while span.parent:
            parent = self._spans.get(span.parent)
            if parent is None:
                return ["?", *found]
            span = parent
            found.insert(0, f"{span.node} {span.name}")
        return found


def _seen(node: str, span: Any) -> Seen:
    return Seen(
        node,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {each.key: each.value.string_value or each.value.int_value for each in span.attributes},
        span.status.message,
    )


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Run a collector, and yield it with its endpoint."""
    collector = Collector()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield collector, f"http://127.0.0.1:{port}"
        finally:
            server.stop(None).wait()
