"""Grafana boards of docs/monitoring/boards, written from the table below.

python scripts/boards.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1] / "docs" / "monitoring" / "boards"
NODE = 'job="$job", instance=~"$node"'
PARTITION = f'{NODE}, partition=~"$partition"'
RATE = "$__rate_interval"


class Panel(NamedTuple):
    """A chart: its title, its unit as Grafana calls it, and lines by their legends."""

    title: str
    unit: str
    lines: dict[str, str]
    text: str = ""


def rate(name: str, by: str = "instance", where: str = NODE) -> str:
    return f"sum by ({by}) (rate({name}{{{where}}}[{RATE}]))"


def quantile(share: float, name: str, by: str = "instance") -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({name}_bucket{{{NODE}}}[{RATE}])))"


def now(name: str, by: str = "instance", where: str = NODE, how: str = "max") -> str:
    return f"{how} by ({by}) ({name}{{{where}}})"


def leading(name: str) -> str:
    return rate(f"kvstore_partition_leading_{name}_total", "partition", PARTITION)


EACH, OF = "{{instance}}", "{{partition}}"
SEQ = f"kvstore_partition_seq{{{PARTITION}}}"
BEHIND = f"max by (partition) ({SEQ}) - on (partition) group_right {SEQ}"
CLUSTER: dict[str, list[Panel]] = {
    "Is it well?": [
        Panel(
            "Nodes that are ready",
            "short",
            {"ready": f"sum(kvstore_process_ready{{{NODE}}})", "scraped": f"count(up{{{NODE}}})"},
        ),
        Panel("Partitions without a leader", "short", {EACH: now("kvstore_server_partitions_without_leader")}),
        Panel("Session with the metadata store", "short", {EACH: now("kvstore_process_metadata_connected")}),
        Panel("Bookies that are full", "short", {EACH: now("kvstore_bookie_readonly")}),
        Panel(
            "Ledgers that lack copies",
            "short",
            {
                "marked": f"max(kvstore_autorecovery_ledgers_marked{{{NODE}}})",
                "unreadable": f"max(kvstore_autorecovery_ledgers_unreadable{{{NODE}}})",
            },
        ),
        Panel(
            "Log: warnings and errors",
            "short",
            {
                f"warnings {EACH}": rate("kvstore_process_log_warnings_total"),
                f"errors {EACH}": rate("kvstore_process_log_errors_total"),
            },
        ),
    ],
    "What clients see": [
        Panel(
            "Operations",
            "ops",
            {
                "answered": f"sum(kvstore_partition_load_operations_per_second{{{NODE}}})",
                "writes": f"sum(kvstore_partition_load_writes_per_second{{{NODE}}})",
            },
        ),
        Panel("Redis commands", "ops", {EACH: rate("kvstore_server_resp_commands_total")}),
        Panel(
            "Redis: 99 of 100 take less",
            "s",
            {EACH: quantile(0.99, "kvstore_server_resp_command_seconds")},
            "Of one in 16 rounds of commands.",
        ),
        Panel("Python clients: 99 of 100 take less", "s", {EACH: quantile(0.99, "kvstore_server_grpc_call_seconds")}),
        Panel(
            "Slow operations",
            "ops",
            {
                "at endpoints": rate("kvstore_server_slow_endpoint_total", "job"),
                "on links": rate("kvstore_server_slow_link_total", "job"),
                "without a leader": rate("kvstore_server_slow_waiting_total", "job"),
                "at leaders": rate("kvstore_server_slow_leader_total", "job"),
            },
            "kvstore node slow-log NODE shows them.",
        ),
        Panel(
            "Traces",
            "ops",
            {
                "sampled": rate("kvstore_server_traces_sampled_total", "job"),
                "left out": rate("kvstore_server_traces_left_out_total", "job"),
                "spans dropped": rate("kvstore_server_traces_spans_dropped_total", "job"),
                "spans not taken": rate("kvstore_server_traces_spans_refused_total", "job"),
            },
            "0 where [tracing] has no endpoint.",
        ),
        Panel(
            "Refused",
            "ops",
            {
                f"no leader {EACH}": rate("kvstore_server_leader_wait_timeouts_total"),
                f"no right {EACH}": rate("kvstore_server_access_denied_total"),
            },
        ),
    ],
    "Processes": [
        Panel("Processor", "percentunit", {EACH: rate("process_cpu_seconds_total")}),
        Panel("Memory", "bytes", {EACH: now("process_resident_memory_bytes")}),
        Panel("Longest delay of the event loop", "s", {EACH: now("kvstore_process_loop_lag_max_seconds")}),
        Panel("Starved of processor", "percentunit", {EACH: now("kvstore_process_loop_starved_ratio")}),
        Panel(
            "Connections",
            "short",
            {
                f"redis {EACH}": now("kvstore_server_resp_connections"),
                f"bookie {EACH}": now("kvstore_bookie_connections"),
            },
        ),
        Panel("Forwarded to other servers", "ops", {EACH: rate("kvstore_server_forwarded_total")}),
    ],
}
PARTITIONS: dict[str, list[Panel]] = {
    "Replicas": [
        Panel(
            "Leaders",
            "short",
            {OF: now("kvstore_partition_is_leader", "partition", PARTITION, "sum")},
            "One each; none or two for seconds while a lead changes.",
        ),
        Panel("Mutations behind the leader", "short", {f"{OF} {EACH}": BEHIND}),
        Panel(
            "Failed, or in doubt",
            "short",
            {
                f"failed {OF} {EACH}": now("kvstore_partition_has_failed", "partition, instance", PARTITION),
                f"in doubt {OF} {EACH}": now("kvstore_partition_is_in_doubt", "partition, instance", PARTITION),
            },
        ),
        Panel(
            "Changes of the leader in an hour",
            "short",
            {OF: f"max by (partition) (changes(kvstore_partition_epoch{{{PARTITION}}}[1h]))"},
        ),
        Panel("Keys", "short", {OF: now("kvstore_partition_keys", "partition", PARTITION)}),
    ],
    "Load": [
        Panel("Operations", "ops", {OF: now("kvstore_partition_load_operations_per_second", "partition", PARTITION)}),
        Panel("Writes", "ops", {OF: now("kvstore_partition_load_writes_per_second", "partition", PARTITION)}),
        Panel("Written", "Bps", {OF: now("kvstore_partition_load_written_bytes_per_second", "partition", PARTITION)}),
        Panel(
            "Share of the hottest key",
            "percentunit",
            {OF: now("kvstore_partition_load_hottest_key_share", "partition", PARTITION)},
        ),
    ],
    "Leading": [
        Panel(
            "Operations that wait for an entry",
            "short",
            {OF: now("kvstore_partition_leading_queued", "partition", PARTITION)},
        ),
        Panel("Entries in flight", "short", {OF: now("kvstore_partition_leading_in_flight", "partition", PARTITION)}),
        Panel("Reads that wait", "short", {OF: now("kvstore_partition_leading_reads_waiting", "partition", PARTITION)}),
        Panel("Mutations in an entry", "short", {OF: f"{leading('mutations')} / {leading('entries')}"}),
        Panel("Refused", "ops", {OF: rate("kvstore_partition_leading_refused_total", "partition", PARTITION)}),
    ],
    "Transactions over several partitions": [
        Panel(
            "Committed and dropped",
            "ops",
            {
                "committed, {{partition}}": leading("transactions_committed"),
                "dropped, {{partition}}": leading("transactions_dropped"),
                "of these because of a conflict, {{partition}}": leading("transactions_conflicts"),
            },
        ),
        Panel("Intents", "short", {OF: now("kvstore_partition_leading_intents", "partition", PARTITION)}),
        Panel(
            "Age of the oldest intent",
            "s",
            {OF: now("kvstore_partition_leading_oldest_intent_seconds", "partition", PARTITION)},
            "Most intents last for milliseconds. The alert KvstoreIntentOld fires after 30 s.",
        ),
        Panel(
            "Operations that wait for transactions",
            "short",
            {
                "writes, {{partition}}": now("kvstore_partition_leading_locked", "partition", PARTITION),
                "reads, {{partition}}": now("kvstore_partition_leading_reads_held", "partition", PARTITION),
            },
        ),
    ],
    "Logs": [
        Panel("Ledgers", "short", {OF: now("kvstore_partition_log_ledgers", "partition", PARTITION)}),
        Panel("Size of their list", "bytes", {OF: now("kvstore_partition_log_list_bytes", "partition", PARTITION)}),
        Panel(
            "Ledgers that lack copies",
            "short",
            {OF: now("kvstore_partition_log_ledgers_lacking_copies", "partition", PARTITION)},
        ),
        Panel(
            "Pins held", "short", {f"{OF} {EACH}": now("kvstore_partition_pins_held", "partition, instance", PARTITION)}
        ),
    ],
}
BOOKIES: dict[str, list[Panel]] = {
    "Disks": [
        Panel("Free", "bytes", {EACH: now("kvstore_bookie_free_bytes")}),
        Panel("Taken by entries", "bytes", {EACH: now("kvstore_bookie_disk_bytes")}),
        Panel("Sync: 99 of 100 take less", "s", {EACH: quantile(0.99, "kvstore_bookie_sync_seconds")}),
        Panel("Sync: half take less", "s", {EACH: quantile(0.5, "kvstore_bookie_sync_seconds")}),
        Panel(
            "Failed directories, damaged records",
            "short",
            {
                f"directories {EACH}": now("kvstore_bookie_directories_failed"),
                f"records {EACH}": now("kvstore_bookie_damaged_records_total"),
            },
        ),
        Panel("Read again in search of damage", "Bps", {EACH: rate("kvstore_bookie_scrubbed_bytes_total")}),
    ],
    "Entries": [
        Panel("Stored", "ops", {EACH: rate("kvstore_bookie_adds_total")}),
        Panel("Stored", "Bps", {EACH: rate("kvstore_bookie_add_bytes_total")}),
        Panel("Asked for", "ops", {EACH: rate("kvstore_bookie_reads_total")}),
        Panel(
            "Records in a sync",
            "short",
            {EACH: f"{rate('kvstore_bookie_group_records_sum')} / {rate('kvstore_bookie_group_records_count')}"},
        ),
        Panel(
            "Refused",
            "ops",
            {
                f"fenced {EACH}": rate("kvstore_bookie_refused_fenced_total"),
                f"overload {EACH}": rate("kvstore_bookie_refused_overload_total"),
                f"full {EACH}": rate("kvstore_bookie_refused_readonly_total"),
                f"wrong key {EACH}": rate("kvstore_bookie_refused_key_total"),
            },
        ),
        Panel(
            "Ledgers",
            "short",
            {f"here {EACH}": now("kvstore_bookie_ledgers"), f"in limbo {EACH}": now("kvstore_bookie_limbo_ledgers")},
        ),
    ],
    "Repair": [
        Panel(
            "Marked",
            "short",
            {
                "marked": f"max(kvstore_autorecovery_ledgers_marked{{{NODE}}})",
                "under way": f"sum(kvstore_autorecovery_ledgers_repairing{{{NODE}}})",
            },
        ),
        Panel("Copied", "Bps", {EACH: rate("kvstore_autorecovery_copied_bytes_total")}),
        Panel("Attempts that failed", "ops", {EACH: rate("kvstore_autorecovery_attempts_failed_total")}),
        Panel(
            "Bookies that are lost",
            "short",
            {
                "lost": f"max(kvstore_auditor_bookies_lost{{{NODE}}})",
                "auditors": f"sum(kvstore_auditor_active{{{NODE}}})",
            },
        ),
    ],
}
BOARDS = {
    "kvstore-cluster": ("kvstore: the cluster", CLUSTER),
    "kvstore-partitions": ("kvstore: partitions and logs", PARTITIONS),
    "kvstore-bookies": ("kvstore: bookies and repair", BOOKIES),
}
WIDTH, HEIGHT, ACROSS = 8, 7, 3
SOURCE = {"type": "prometheus", "uid": "${source}"}


def board(uid: str, title: str, rows: dict[str, list[Panel]]) -> dict[str, Any]:
    """One board in Grafana's form (schema 39: Grafana 10.4 and later)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, charts in rows.items():
        panels.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []})
        top += 1
        for place, chart in enumerate(charts):
            at = {"x": place % ACROSS * WIDTH, "y": top + place // ACROSS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_chart(chart, at))
        top += -(-len(charts) // ACROSS) * HEIGHT
    for id, panel in enumerate(panels, 1):
        panel["id"] = id
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvstore"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "graphTooltip": 1,
        "links": [{"type": "dashboards", "tags": ["kvstore"], "title": "kvstore", "asDropdown": False}],
        "templating": {"list": _variables(has_partitions=rows is PARTITIONS)},
        "panels": panels,
    }


def _chart(chart: Panel, at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for place, (legend, expression) in enumerate(chart.lines.items())
    ]
    return {
        "type": "timeseries",
        "title": chart.title,
        "description": chart.text,
        "gridPos": at,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": chart.unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _variables(*, has_partitions: bool) -> list[dict[str, Any]]:
    asked = [("job", "up", "job", False), ("node", 'up{job="$job"}', "instance", True)]
    if has_partitions:
        asked.append(("partition", 'kvstore_partition_seq{job="$job"}', "partition", True))
    found: list[dict[str, Any]] = [{"name": "source", "label": "source", "type": "datasource", "query": "prometheus"}]
    for name, series, label, is_many in asked:
        query = f"label_values({series}, {label})"
        variable = {"name": name, "label": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2}
        many = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        found.append(variable | (many if is_many else {"current": {"text": "kvstore", "value": "kvstore"}}))
    return found


def written() -> dict[str, str]:
    """The boards' files by their names."""
    return {
        f"{uid}.json": json.dumps(board(uid, title, rows), indent=1, ensure_ascii=False) + "\n"
        for uid, (title, rows) in BOARDS.items()
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for name, text in written().items():
        (folder / name).write_text(text, encoding="utf-8")
