"""The names of metrics about the event loop, the disks and the log of a process, as metric_names.py has the others."""

from __future__ import annotations

LIVENESS: dict[str, tuple[str, str]] = {
    "process_liveness_failing": (
        "process_liveness_failing",
        "1 while the node has no metadata session because its event loop or a disk hangs.",
    ),
    "process_liveness_failures_total": (
        "process_liveness_failures_total",
        "Number of times the node ended its metadata session because its event loop or a disk hung.",
    ),
    "process_loop_silence_s": ("process_loop_silence_seconds", "Time since the event loop last turned."),
    "process_disk_silence_s": (
        "process_disk_silence_seconds",
        "Longest time of a data directory in which its disk has not completed a pending write.",
    ),
    "process_log_lines_dropped_total": (
        "process_log_lines_dropped_total",
        "Number of log lines dropped because standard error or the log's disk did not take them fast enough.",
    ),
}
