"""Spans that have ended, on their way to the collector: a bounded queue, emptied by a thread of its own.

The event loop only appends to the queue. What finds it full is dropped and counted, and so is what the collector does
not take in time: traces are worth less than the operations that they are about.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

QUEUED_MAX = 4_096
"""Spans that wait; one more is dropped."""
BATCH_MAX = 512
"""Spans of one request to the collector."""
GATHER_S = 1.0
"""How long spans wait for others to share a request, unless there is a batch of them."""
CLOSE_S = 2.0
"""How long a stop waits for the collector to take what is left."""


class ExportQueue(SpanProcessor):
    """Hands spans to an exporter. `close` at the end."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self.exported = self.dropped = self.refused = 0
        """Spans that the collector has taken; that found the queue full; that it has not taken."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Nothing is known of it yet."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, unless the queue is full."""
        if len(self._queue) >= QUEUED_MAX or self._is_closing:
            self.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        """Send what is queued, for at most CLOSE_S; blocks for as long."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            self._wake.wait(GATHER_S)
            self._wake.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))])
            if self._is_closing:
                return

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001  # the root of a thread: whatever a library raises, the next batch is tried
            is_taken = False
        if is_taken:
            self.exported += len(batch)
        else:
            self.refused += len(batch)
