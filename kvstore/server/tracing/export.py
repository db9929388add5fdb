"""A queue of ended spans for the collector. The queue is bounded, and a thread of its own sends the spans.

The event loop only appends to the queue. Spans are dropped and counted if the queue is full or if the collector does
not accept them in time, because traces matter less than the operations that they describe.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

QUEUED_MAX = 4_096
"""Maximum number of waiting spans. Further spans are dropped."""
BATCH_MAX = 512
"""Maximum number of spans in one request to the collector."""
GATHER_S = 1.0
"""Time in seconds that spans wait for others to share a request, unless a batch is full."""
CLOSE_S = 2.0
"""Time in seconds that a stop waits for the collector to accept the remaining spans."""


class ExportQueue(SpanProcessor):
    """Passes ended spans to an exporter. Call `close` at the end."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self.exported = self.dropped = self.refused = 0
        """Numbers of spans that the collector accepted, that found the queue full, and that the collector did not
        accept."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Do nothing, because only ended spans are exported."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, unless the queue is full."""
        if len(self._queue) >= QUEUED_MAX or self._is_closing:
            self.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        """Send the queued spans and stop. Blocks for at most CLOSE_S seconds."""
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
