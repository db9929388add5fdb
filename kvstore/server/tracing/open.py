"""Opens a node's traces if its settings turn tracing on. Tracing requires an optional extra, and its packages are
imported only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.env import Env
from kvstore.env.traces import Traces
from kvstore.errors import ConfigError
from kvstore.extras import install_hint
from kvstore.server.routing.backend import Backend
from kvstore.server.tracing_config import TracingConfig

if TYPE_CHECKING:
    from kvstore.server.tracing.calls import TracedPages
    from kvstore.server.tracing.spans import NodeTraces

EXPORT_S = 5.0
"""Time in seconds for one request to the collector, including attempts."""


def open_traces(settings: TracingConfig, node: str, version: str, env: Env) -> NodeTraces | None:
    """Return the traces of a node, or None if tracing is off. Raises ConfigError if the extra is not installed or
    the certificate cannot be read."""
    if not settings.endpoint:
        return None
    exporter_class = _exporter_class()
    from kvstore.server.tracing.spans import NodeTraces

    credentials = None
    if settings.endpoint.startswith("https:"):
        credentials = grpc.ssl_channel_credentials(_certificate(settings))
    exporter = exporter_class(
        endpoint=settings.endpoint, insecure=credentials is None, credentials=credentials, timeout=EXPORT_S
    )
    return NodeTraces(node, env.clock, env.random, exporter, settings.sample_ratio, version)


def check_traces(settings: TracingConfig) -> None:
    """Check the settings for `open_traces` without opening anything. Raises ConfigError in the same cases as
    `open_traces`."""
    if settings.endpoint:
        _exporter_class()
        _certificate(settings)


def _exporter_class() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"tracing.endpoint: {error}: {install_hint('tracing')}") from error
    return OTLPSpanExporter


def traced_backend(traces: Traces, backend: Backend, endpoint: str) -> Backend:
    """Return the backend to which an endpoint submits operations. This is `backend` itself if tracing is off."""
    if not traces.is_on:
        return backend
    from kvstore.server.tracing.backend import ByRatio, TracedBackend
    from kvstore.server.tracing.spans import NodeTraces

    assert isinstance(traces, NodeTraces)
    return TracedBackend(backend, ByRatio(traces, endpoint))


def backend_of_calls(traces: Traces, backend: Backend, endpoint: str) -> Backend:
    """Return the backend for an endpoint that submits operations only in the tasks of its calls, which may have
    parents."""
    if not traces.is_on:
        return backend
    from kvstore.server.tracing.backend import ByRatio
    from kvstore.server.tracing.calls import CallsBackend
    from kvstore.server.tracing.spans import NodeTraces

    assert isinstance(traces, NodeTraces)
    return CallsBackend(backend, ByRatio(traces, endpoint))


def traced_calls(traces: Traces) -> tuple[list[Any], Callable[[Backend], Backend]]:
    """Return the interceptors with which a gRPC server reads the parent spans of its calls, and a function that
    returns the backend for the current call."""
    if not traces.is_on:
        return [], lambda backend: backend
    from kvstore.server.tracing.calls import TracedCalls, backend_of_call
    from kvstore.server.tracing.spans import NodeTraces

    assert isinstance(traces, NodeTraces)
    return [TracedCalls(traces)], backend_of_call


def traced_pages(traces: Traces) -> TracedPages | None:
    """Return the reader of the parent spans of HTTP requests, or None if tracing is off."""
    if not traces.is_on:
        return None
    from kvstore.server.tracing.calls import TracedPages
    from kvstore.server.tracing.spans import NodeTraces

    assert isinstance(traces, NodeTraces)
    return TracedPages(traces)


def _certificate(settings: TracingConfig) -> bytes | None:
    if settings.ca is None:
        return None
    try:
        found = settings.ca.read_bytes()
    except OSError as error:
        raise ConfigError(f"tracing.ca: {settings.ca} cannot be read: {error.strerror or error}") from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigError(f"tracing.ca: expected a PEM certificate in {settings.ca}, got none")
    return found
