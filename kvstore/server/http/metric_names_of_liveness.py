"""The names of metrics about the event loop, the disks and the log of a process, as metric_names.py has the others."""

from __future__ import annotations

LIVENESS: dict[str, tuple[str, str]] = {
    "process_log_lines_dropped_total": (
        "process_log_lines_dropped_total",
        "Number of log lines dropped because standard error or the log's disk did not take them fast enough.",
    ),
}
