"""Runs the example's job once with Dagster, in its environment, and writes what Dagster knows about the run."""

import importlib.util
import json
import sys
from pathlib import Path

import dagster as dg

spec = importlib.util.spec_from_file_location("example", sys.argv[1])
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
vars(example).update(RETRIES=1, RETRY_S=0)

with dg.DagsterInstance.ephemeral() as instance:
    done = example.definitions.resolve_job_def("kvstore_nightly").execute_in_process(
        instance=instance, raise_on_error=False
    )
    found = {"outcome": "success" if done.success else "failed", "tries": 1}
    for event in done.all_events:
        if event.event_type_value == "STEP_RESTARTED":
            found["tries"] += 1
        if event.event_type_value == "ASSET_MATERIALIZATION":
            metadata = event.materialization.metadata
            found |= {name: value.value for name, value in metadata.items() if name in ("id", "kind", "added")}
Path(sys.argv[2]).write_text(json.dumps(found))
