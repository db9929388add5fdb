"""The reference of the metrics, docs/reference/metrics.md, from their declarations."""

from __future__ import annotations

from kvstore.server.http.metric_table import METRICS
from kvstore.server.http.metrics import PREFIX
from scripts.pages import one_line, table

HEAD = """# Metrics

The metrics that a node publishes at `GET /metrics`, for operators who write queries and alerts. `make reference` writes
this page from kvstore/server/http/metric_table.py: do not edit it here.
[Alerts](alerts.md) lists what to alert on, and [monitoring](../monitoring/README.md) has
rules and boards.

Counters start at 0 with the process, or with the lead if the description says so. A node also publishes the usual
`process_…` metrics of Prometheus: processor seconds, resident memory, open files and start time.

A node makes the page at most once per second. A scrape that arrives earlier gets the previous page, so *since the last
scrape* means since the page was last made. If making the page takes long, for example with hundreds of partitions, the
node serves it for nine times as long as that took.
"""


def reference() -> str:
    """Return the page."""
    parts = [HEAD]
    for part, found in METRICS.items():
        rows = [
            (f"`{PREFIX}_{each.name}`", each.kind.value, each.label and f"`{each.label}`", one_line(each.text))
            for each in found
        ]
        parts.append(f"## {part}\n\n{table(('metric', 'type', 'label', 'description'), rows)}")
    return "\n".join(parts)
