"""A DAG for Apache Airflow 3: every night a snapshot, verified and pruned, then an update of a Delta table.

Copy this file to the DAGs folder. The workers need the `kvstore` command of the wheel with the extras `node`, `spark`
and `delta`, and these variables:

    KVSTORE_COMMAND    kvstore, if it is not in PATH; it may be in another environment than Airflow
    KVSTORE_CLUSTER    how to find the cluster, for example: --metadata zk1:2181,zk2:2181,zk3:2181/kvstore
    KVSTORE_SNAPSHOTS  directory or URL of the snapshots
    KVSTORE_TABLE      path or URL of the Delta table

A run that the cluster did not answer, or whose driver was killed, is tried again and continues. Any other failure needs
an operator, so Airflow fails the run at once.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException

UNAVAILABLE = 3
"""The exit code after which another try can succeed (docs/reference/snapshots.md). That of a killed driver is
negative."""


def kvstore(*words: str) -> dict[str, Any]:
    """Run `kvstore snapshot` and return its JSON document. Its messages go to the task's log."""
    command = [*shlex.split(os.environ.get("KVSTORE_COMMAND", "kvstore")), "snapshot", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == UNAVAILABLE or done.returncode < 0:
        raise AirflowException(f"exit code {done.returncode}; the next try continues")
    if done.returncode:
        raise AirflowFailException(f"exit code {done.returncode}: {done.stdout}")
    return dict(json.loads(done.stdout))


@dag(schedule="15 2 * * *", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False, max_active_runs=1)
def kvstore_nightly() -> None:
    @task(retries=4, retry_delay=timedelta(minutes=5), execution_timeout=timedelta(hours=6))
    def snapshot() -> dict[str, Any]:
        cluster = shlex.split(os.environ["KVSTORE_CLUSTER"])
        night = kvstore("nightly", "--to", os.environ["KVSTORE_SNAPSHOTS"], *cluster)
        newest = night["snapshots"][-1]
        return {
            "id": newest["id"],
            "kind": newest["kind"],
            "rows": newest["rows"],
            "removed": night["pruned"]["removed"],
        }

    @task(retries=2, retry_delay=timedelta(minutes=5))
    def export(newest: dict[str, Any]) -> list[str]:
        done = kvstore("delta", os.environ["KVSTORE_SNAPSHOTS"], os.environ["KVSTORE_TABLE"], newest["id"])
        return list(done["added"])

    export(snapshot())  # type: ignore[arg-type]  # Airflow passes the result of the task


kvstore_nightly()
