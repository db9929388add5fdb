"""Assets for Dagster: every night a snapshot, verified and pruned, then an update of a Delta table.

    dagster dev -f examples/dagster_nightly.py

The variables KVSTORE_COMMAND, KVSTORE_CLUSTER, KVSTORE_SNAPSHOTS and KVSTORE_TABLE are those of
examples/airflow_nightly.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

import dagster as dg

UNAVAILABLE = 3
"""The exit code after which another try can succeed (docs/reference/snapshots.md). That of a killed driver is
negative."""
RETRIES, RETRY_S = 4, 300


def kvstore(*words: str) -> dict[str, Any]:
    """Run `kvstore snapshot` and return its JSON document. Its messages go to the run's log."""
    command = [*shlex.split(os.environ.get("KVSTORE_COMMAND", "kvstore")), "snapshot", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == UNAVAILABLE or done.returncode < 0:
        raise dg.RetryRequested(max_retries=RETRIES, seconds_to_wait=RETRY_S)
    if done.returncode:
        raise dg.Failure(f"exit code {done.returncode}: {done.stdout}", allow_retries=False)
    return dict(json.loads(done.stdout))


@dg.asset
def kvstore_snapshot() -> dg.MaterializeResult:
    """The newest snapshot of the store, verified."""
    cluster = shlex.split(os.environ["KVSTORE_CLUSTER"])
    night = kvstore("nightly", "--to", os.environ["KVSTORE_SNAPSHOTS"], *cluster)
    newest = night["snapshots"][-1]
    return dg.MaterializeResult(
        metadata={
            "id": newest["id"],
            "kind": newest["kind"],
            "path": dg.MetadataValue.path(newest["path"]),
            "dagster/row_count": newest["rows"],
            "bytes": newest["bytes"],
            "removed": night["pruned"]["removed"],
            "warnings": night["warnings"],
        }
    )


@dg.asset(deps=[kvstore_snapshot])
def kvstore_table() -> dg.MaterializeResult:
    """The Delta table at the newest snapshot, with one row per key."""
    done = kvstore("delta", os.environ["KVSTORE_SNAPSHOTS"], os.environ["KVSTORE_TABLE"])
    return dg.MaterializeResult(metadata={"id": done["snapshot"], "added": done["added"]})


nightly = dg.define_asset_job("kvstore_nightly", [kvstore_snapshot, kvstore_table])
definitions = dg.Definitions(
    assets=[kvstore_snapshot, kvstore_table],
    jobs=[nightly],
    schedules=[dg.ScheduleDefinition(job=nightly, cron_schedule="15 2 * * *")],
)
