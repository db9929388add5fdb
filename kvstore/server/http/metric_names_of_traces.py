"""The names of metrics about traces, as metric_names.py has the others."""

from __future__ import annotations

TRACES: dict[str, tuple[str, str]] = {
    "server_traces_sampled_total": ("server_traces_sampled_total", "Operations and calls that were sampled here."),
    "server_traces_left_out_total": ("server_traces_left_out_total", "Those left out: 500 had been in that second."),
    "server_traces_spans_exported_total": (
        "server_traces_spans_exported_total",
        "Spans that the collector has taken.",
    ),
    "server_traces_spans_dropped_total": (
        "server_traces_spans_dropped_total",
        "Spans that were dropped since 4,096 waited for the collector.",
    ),
    "server_traces_spans_refused_total": (
        "server_traces_spans_refused_total",
        "Spans that the collector has not taken in time, or at all.",
    ),
}
