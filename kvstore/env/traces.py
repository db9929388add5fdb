"""Spans of sampled operations, as the parts on an operation's way know them. Decides only.

See docs/how-to/trace-operations.md.

Where traces are off, and while no sampled operation is under way, a hot path does no more than look at `live`.
"""

from __future__ import annotations

from typing import Protocol

COUNTS = (
    *("traces_sampled_total", "traces_left_out_total"),
    *("traces_spans_exported_total", "traces_spans_dropped_total", "traces_spans_refused_total"),
)


class Span(Protocol):
    """One step of a sampled operation. Times are seconds of the node's clock; without one it is now."""

    began_s: float

    @property
    def traceparent(self) -> str:
        """The step as the parent of another node's, in the words of W3C Trace Context."""
        ...

    def child(self, name: str, began_s: float | None = None, **attributes: str | int) -> Span:
        """Begin a step within this one, which may be over."""
        ...

    def end(self, ended_s: float | None = None, error: str = "") -> None:
        """End the step. What comes after the first call counts for nothing."""
        ...


class Traces:
    """The traces of one node. This class takes none."""

    live = 0
    """Sampled steps that have not ended here, and entries whose bookies may still answer."""
    is_on = False

    def serve(self, name: str, traceparent: str, **attributes: str | int) -> Span | None:
        """Begin a step whose parent is another process's; None unless that one is sampled."""
        return None

    def stored(self, ledger: int, entry: int, bookie: str) -> None:
        """Take note that a bookie has stored an entry. Called while `live`."""

    def acknowledged(self, span: Span, ledger: int, entry: int, sent_s: float) -> None:
        """Give `span`, the append of an entry, a child for each bookie that has stored it or will soon."""

    def statistics(self) -> dict[str, int]:
        return dict.fromkeys(COUNTS, 0)
