"""Metrics about a directory of snapshots for the textfile collector of Prometheus's node_exporter. Needs no node.

A textfile stays when the job that writes it stops, so the file has moments instead of ages: `time() - moment` grows
until the next snapshot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstore.env.files.private import draft_of
from kvstore.errors import ConfigError
from kvstore.spark.snapshots.inventory import Inventory

PUBLIC_MODE = 0o644
"""node_exporter runs under its own account, and the metrics are not secret."""


class Metric(NamedTuple):
    """A gauge about a directory of snapshots."""

    description: str
    value_of: Callable[[Inventory, float], float | None]
    """Returns the value at a moment in seconds since 1970, or None if the metric is absent."""


METRICS = {
    "kvstore_snapshot_complete_timestamp_seconds": Metric(
        "Moment up to which the newest usable snapshot has all writes, by the servers' clocks, in seconds since 1970.",
        lambda found, _: None if found.complete_until_ms is None else found.complete_until_ms / 1000,
    ),
    "kvstore_snapshot_newest_bytes": Metric(
        "Size of the newest usable snapshot in bytes, without its parents.",
        lambda found, _: None if found.newest is None else found.newest.size_bytes,
    ),
    "kvstore_snapshot_newest_rows": Metric(
        "Number of rows of the newest usable snapshot, without its parents.",
        lambda found, _: None if found.newest is None else found.newest.rows,
    ),
    "kvstore_snapshot_directory_bytes": Metric(
        "Size of all snapshots in the directory in bytes, by their manifests.",
        lambda found, _: sum(each.manifest.size_bytes for each in found.snapshots if each.manifest is not None),
    ),
    "kvstore_snapshot_usable": Metric(
        "Number of snapshots that can be restored.",
        lambda found, _: sum(each.is_usable for each in found.snapshots),
    ),
    "kvstore_snapshot_unusable": Metric(
        "Number of snapshots that cannot be restored, because a file or a parent is missing or damaged.",
        lambda found, _: sum(not each.is_usable for each in found.snapshots),
    ),
    "kvstore_snapshot_legal_holds": Metric(
        "Number of snapshots under a legal hold.",
        lambda found, _: sum(each.legal_hold is not None for each in found.snapshots),
    ),
    "kvstore_snapshot_checked_timestamp_seconds": Metric(
        "Moment at which the directory was checked, in seconds since 1970.", lambda _, now_s: round(now_s, 3)
    ),
}


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
    lines: list[str] = []
    for name, metric in METRICS.items():
        if (value := metric.value_of(found, now_s)) is not None:
            lines += [f"# HELP {name} {metric.description}", f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"
