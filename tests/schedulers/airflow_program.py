"""Runs the example's DAG once with Airflow, in its environment, and writes what Airflow knows about the run."""

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copy

folder = Path(os.environ["AIRFLOW_HOME"]) / "dags"
folder.mkdir(exist_ok=True)
copy(sys.argv[1], folder)
os.environ |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW__CORE__DAGS_FOLDER": str(folder)}

# Airflow reads its settings when it is imported.
from airflow.dag_processing.bundles.manager import DagBundlesManager  # noqa: E402
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db  # noqa: E402
from airflow.utils.db import initdb  # noqa: E402

initdb()
DagBundlesManager().sync_bundles_to_db()
bag = DagBag(str(folder), bundle_name="dags-folder")
assert not bag.import_errors, bag.import_errors
sync_bag_to_db(bag, "dags-folder", None)
dag = bag.dags["kvstore_nightly"]
for each in dag.tasks:
    each.retries, each.retry_delay = 1, timedelta(seconds=0)
run = dag.test(logical_date=datetime.now(UTC))
states = {each.task_id: each for each in run.get_task_instances()}
found = {"outcome": str(run.state.value), "tries": states["snapshot"].try_number}
if run.state.value == "success":
    newest = states["export"].xcom_pull(task_ids="snapshot")
    found |= {"id": newest["id"], "kind": newest["kind"]}
    found["added"] = states["export"].xcom_pull(task_ids="export")
Path(sys.argv[2]).write_text(json.dumps(found))
