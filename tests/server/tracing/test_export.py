"""A slow or absent collector costs spans and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from kvstore.server.tracing import export, spans
from tests.server.tracing.kept import Kept, traces
from tests.waiting import PATIENCE_S, wait_until_blocking


class Stuck(Kept):
    """An exporter that blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go.wait(PATIENCE_S)
        return super().export(spans)


class Away(SpanExporter):
    """An exporter that accepts nothing and reports it in one of two ways."""

    def __init__(self) -> None:
        self.asked = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked += 1
        if self.asked % 2:
            raise OSError("no route to host")
        return SpanExportResult.FAILURE


def take(found: spans.NodeTraces, count: int) -> None:
    for _ in range(count):
        span = found.begin("op", None, SpanKind.SERVER)
        assert span is not None
        span.end()


def test_spans_beyond_a_full_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "QUEUED_MAX", 10)
    monkeypatch.setattr(export, "BATCH_MAX", 4)
    monkeypatch.setattr(export, "GATHER_S", PATIENCE_S)  # the first four are sent in one batch, however long that takes
    stuck = Stuck()
    found = traces(stuck)
    take(found, 4)
    assert stuck.asked.wait(PATIENCE_S)  # they are being sent, and the queue is empty
    take(found, 13)  # returns although the collector hangs
    assert found.statistics()["traces_spans_dropped_total"] == 3
    stuck.go.set()
    found.close()
    assert found.statistics()["traces_spans_exported_total"] == len(stuck.spans) == 14


def test_refused_spans_are_counted_and_the_next_batch_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BATCH_MAX", 2)
    away = Away()
    found = traces(away)
    for count in (2, 4):
        take(found, 2)
        wait_until_blocking(lambda count=count: found.statistics()["traces_spans_refused_total"] == count)
    found.close()
    assert found.statistics()["traces_spans_exported_total"] == 0


def test_close_sends_queued_spans_and_accepts_no_more() -> None:
    kept = Kept()
    found = traces(kept)
    take(found, 3)
    found.close()
    assert len(kept.spans) == 3
    take(found, 1)
    assert found.statistics()["traces_spans_dropped_total"] == 1
