"""Metrics about a directory of snapshots for the textfile collector of Prometheus's node_exporter. Needs no node.

A textfile stays when the job that writes it stops, so the file has moments instead of ages: `time() - moment` grows
until the next snapshot.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.env.files.private import draft_of
from kvstore.errors import ConfigError
from kvstore.spark.snapshots.inventory import Inventory

PUBLIC_MODE = 0o644
"""node_exporter runs under its own account, and the metrics are not secret."""
METRICS = {
    "kvstore_snapshot_complete_timestamp_seconds": "Moment up to which the newest usable snapshot has all writes, by "
    "the servers' clocks, in seconds since 1970.",
    "kvstore_snapshot_newest_bytes": "Size of the newest usable snapshot in bytes, without its parents.",
    "kvstore_snapshot_newest_rows": "Number of rows of the newest usable snapshot, without its parents.",
    "kvstore_snapshot_directory_bytes": "Size of all snapshots in the directory in bytes, by their manifests.",
    "kvstore_snapshot_usable": "Number of snapshots that can be restored.",
    "kvstore_snapshot_unusable": "Number of snapshots that cannot be restored, because a file or a parent is missing "
    "or damaged.",
    "kvstore_snapshot_legal_holds": "Number of snapshots under a legal hold.",
    "kvstore_snapshot_checked_timestamp_seconds": "Moment at which the directory was checked, in seconds since 1970.",
}
"""All metrics, each a gauge, with their descriptions."""


def write_metrics(path: Path, found: Inventory) -> None:
    """Replace the file atomically. Raises ConfigError for a name that node_exporter ignores, OSError."""
    if path.suffix != ".prom":
        raise ConfigError(f"--metrics-file: expected a name that ends with .prom, as node_exporter reads, got {path}")
    draft = draft_of(path, metrics_text(found, time.time()).encode())
    try:
        os.chmod(draft, PUBLIC_MODE)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def metrics_text(found: Inventory, now_s: float) -> str:
    """Return the metrics in Prometheus's text format. Metrics of the newest usable snapshot are absent without one."""
    newest, until_ms = found.newest, found.complete_until_ms
    sizes = [each.manifest.size_bytes for each in found.snapshots if each.manifest is not None]
    usable = sum(each.is_usable for each in found.snapshots)
    values: dict[str, float | None] = {
        "kvstore_snapshot_complete_timestamp_seconds": None if until_ms is None else until_ms / 1000,
        "kvstore_snapshot_newest_bytes": None if newest is None else newest.size_bytes,
        "kvstore_snapshot_newest_rows": None if newest is None else newest.rows,
        "kvstore_snapshot_directory_bytes": sum(sizes),
        "kvstore_snapshot_usable": usable,
        "kvstore_snapshot_unusable": len(found.snapshots) - usable,
        "kvstore_snapshot_legal_holds": sum(each.legal_hold is not None for each in found.snapshots),
        "kvstore_snapshot_checked_timestamp_seconds": round(now_s, 3),
    }
    lines: list[str] = []
    for name, value in values.items():
        if value is not None:
            lines += [f"# HELP {name} {METRICS[name]}", f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"
