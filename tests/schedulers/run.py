"""The examples for Airflow and Dagster, run by the real packages against a cluster of three nodes.

`python -m tests.schedulers.run` installs each package into an environment of its own below `.interop`, with the
versions of `<name>.txt` beside this file. Then it runs three nights with the example: one that works, one after a
change, and one during which the cluster does not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from kvstore.client import Client
from tests.cluster.harness import Cluster, running_cluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PLACE = ROOT / ".interop" / "schedulers"
"""Folder of the environments; git ignores it."""
NAMES = ("airflow", "dagster")
NIGHT_S = 600


def environment(name: str) -> Path:
    """Return the Python of the scheduler's environment, installed if it is missing or its versions have changed."""
    place, wanted = PLACE / name, HERE / f"{name}.txt"
    mark = place / "installed.txt"
    if not mark.exists() or mark.read_bytes() != wanted.read_bytes():
        venv.create(place, with_pip=True, clear=True)
        install = [str(place / "bin" / "python"), "-m", "pip", "install", "--no-cache-dir", "-q", "--no-deps"]
        subprocess.run([*install, "-r", str(wanted)], check=True)
        mark.write_bytes(wanted.read_bytes())
    return place / "bin" / "python"


def night(name: str, python: Path, folder: Path, cluster: str) -> dict[str, Any]:
    """Run one night with the scheduler's own program, and return what it says about the night."""
    environ = {
        **os.environ,
        "KVSTORE_COMMAND": f"{sys.executable} -m kvstore",
        "KVSTORE_CLUSTER": cluster,
        "KVSTORE_SNAPSHOTS": str(folder / name / "snapshots"),
        "KVSTORE_TABLE": str(folder / name / "table"),
        "AIRFLOW_HOME": str(folder / name),
        "DAGSTER_HOME": str(folder / name),
        "PYTHONPATH": str(ROOT),
    }
    (folder / name).mkdir(exist_ok=True)
    result = folder / name / "result.json"
    program = [str(python), str(HERE / f"{name}_program.py"), str(ROOT / "examples" / f"{name}_nightly.py")]
    log = folder / name / "log"
    with log.open("ab") as output:
        done = subprocess.run(
            [*program, str(result)], env=environ, timeout=NIGHT_S, check=False, stdout=output, stderr=output
        )
    if done.returncode:
        sys.exit(f"{name}: the program ended with {done.returncode}\n{log.read_text()[-4000:]}")
    return dict(json.loads(result.read_text()))


def three_nights(name: str, folder: Path, cluster: Cluster) -> None:
    python, where = environment(name), f"--data-dir {cluster.local.data_dir} --master none"
    first = night(name, python, folder, where)
    assert (first["outcome"], first["kind"]) == ("success", "full"), first
    with Client(cluster.url) as client:
        client.put(f"scheduled by {name}".encode(), b"x")
    second = night(name, python, folder, where)
    assert (second["outcome"], second["kind"]) == ("success", "incremental"), second
    assert second["added"] == [second["id"]], "the table has what the night before lacked"
    third = night(name, python, folder, "--server 127.0.0.1:1 --metadata 127.0.0.1:1/x")
    assert third["outcome"] == "failed", third
    assert third["tries"] > 1, "another try could have succeeded"
    print(f"{name}: three nights as expected")


def main() -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with running_cluster(folder / "cluster") as cluster:
            with Client(cluster.url) as client:
                client.put_many({b"key%03d" % number: b"%d" % number for number in range(100)})
            for name in NAMES:
                three_nights(name, folder, cluster)


if __name__ == "__main__":
    main()
