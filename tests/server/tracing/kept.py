"""Traces whose spans a test keeps, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvstore.env import Clock
from kvstore.server.tracing.spans import NodeTraces


class Kept(SpanExporter):
    """An exporter that keeps its spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing."""

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans if each.name == name]

    def parent_of(self, span: ReadableSpan) -> ReadableSpan | None:
        if span.parent is None:
            return None
        return next((each for each in self.spans if each.context.span_id == span.parent.span_id), None)

    def path(self, span: ReadableSpan) -> list[str]:
        """Return the names of a span's known ancestors, and its own."""
        parent = self.parent_of(span)
        return [*(self.path(parent) if parent is not None else []), span.name]


class MovedClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.at = 1_000.0

    def now(self) -> float:
        return self.at

    def date_ms(self) -> int:
        return 1_700_000_000_000


def traces(
    exporter: SpanExporter, ratio: float = 1.0, *, node: str = "n1", clock: Any = None, seed: int = 0
) -> NodeTraces:
    return NodeTraces(node, cast("Clock", clock or MovedClock()), Random(seed), exporter, ratio)
