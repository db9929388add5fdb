"""Spans of sampled operations, as each part that an operation passes sees them (docs/how-to/trace-operations.md).
Decides only.

While traces are off or no sampled operation is in flight, a hot path only reads `live`.
"""

from __future__ import annotations

from typing import Protocol

COUNTS = (
    *("traces_sampled_total", "traces_left_out_total"),
    *("traces_spans_exported_total", "traces_spans_dropped_total", "traces_spans_refused_total"),
)


class TraceSpan(Protocol):
    """One step of a sampled operation. Times are seconds of the node's clock; without one the time is now."""

    began_s: float

    @property
    def traceparent(self) -> str:
        """The step as the parent of a step on another node, in the format of W3C Trace Context."""
        ...

    def child(self, name: str, began_s: float | None = None, **attributes: str | int) -> TraceSpan:
        """Begin a step within this one, which may have ended."""
        ...

    def end(self, ended_s: float | None = None, error: str = "") -> None:
        """End the step. Later calls are ignored."""
        ...


class Traces:
    """The traces of one node. This class takes none."""

    live = 0
    """Number of sampled steps that have not ended here, and of entries whose bookies may still answer."""
    is_on = False

    def serve(self, name: str, traceparent: str, **attributes: str | int) -> TraceSpan | None:
        """Begin a step whose parent belongs to another process; None unless the parent is sampled."""
        return None

    def stored(self, ledger: int, entry: int, bookie: str) -> None:
        """Record that a bookie has stored an entry. Called while `live` is not 0."""

    def acknowledged(self, span: TraceSpan, ledger: int, entry: int, sent_s: float) -> None:
        """Give `span`, the append of an entry, a child for each bookie that has stored it or will soon."""

    def statistics(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0)
