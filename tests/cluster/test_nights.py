"""Three nights of `kvstore snapshot nightly` on a cluster whose ring changes, with a driver that is killed; and the
alert about the night that is missing. Real processes, and only the days are short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.client import Client
from kvstore.spark.snapshots.directory import DirectoryStore
from kvstore.spark.snapshots.work import Work
from tests.cluster.harness import Cluster, running_cluster
from tests.source import ROOT
from tests.spark.snapshots.taken import ONE_FILE, assert_right, fill, kill, notes, running
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]

OPTIONS = ("--keep", "1", "--daily", "0", "--weekly", "0", "--monthly", "0")
SHORT_DAYS = "from kvstore.cli import snapshot_nightly\nsnapshot_nightly.DAY_MS = 1"
"""The code that a driver runs first for which the last full snapshot is a week old."""
HOUR_S = 3600


def night(cluster: Cluster, store: DirectoryStore, metrics: Path, first: str = "") -> dict[str, Any]:
    line = ["snapshot", "nightly", "--to", str(store.root), "--metrics-file", str(metrics), "--json", *OPTIONS]
    script = f"{first}\nimport sys\nsys.argv = ['kvstore', *sys.argv[1:]]\nfrom kvstore.__main__ import main\nmain()"
    where = ["--data-dir", str(cluster.local.data_dir), "--master", "none"]
    done = subprocess.run(
        [sys.executable, "-c", script, *line, *where], capture_output=True, text=True, timeout=300, check=False
    )
    result: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, result["outcome"], result["problems"]) == (0, "done", []), done.stderr
    return result


def test_three_nights_with_a_new_partition_and_a_killed_driver(tmp_path: Path) -> None:
    store, metrics = DirectoryStore(tmp_path / "backup"), tmp_path / "kvstore.prom"
    with running_cluster(tmp_path / "cluster") as cluster, Client(cluster.url + "?timeout=30s") as client:
        fill(client)
        (full,) = night(cluster, store, metrics)["snapshots"]
        assert full["kind"] == "full"

        words = ["ring", "add", "p4", "--data-dir", str(cluster.local.data_dir)]
        subprocess.run([sys.executable, "-m", "kvstore", *words], check=True, capture_output=True, timeout=120)
        client.put_many({b"key%05d" % number: b"second night" for number in range(300)})
        wait_until_blocking(lambda: "p4" in owners(cluster), timeout_s=120, what="p4 owns something")
        client.delete(b"key00001")
        command = ("nightly", "--to", str(store.root), *OPTIONS)
        with running(cluster, tmp_path / "log", *command, master="none", first=ONE_FILE) as driver:
            wait_until_blocking(lambda: notes(store), timeout_s=200, what="a first file")
            kill(driver)
        (left,) = store.remains()
        plan = Work(store, left).plan_or_none()
        assert plan is not None
        assert store.ids() == [full["id"]]
        second = night(cluster, store, metrics)
        (incremental,) = second["snapshots"]
        assert (incremental["id"], incremental["parent"]) == (plan.id, full["id"]), "it continued the killed one"
        assert second["pruned"]["kept"] == {plan.id: ["newest"], full["id"]: [f"needed by {plan.id}"]}
        assert_right(cluster, store, store.load(plan.id))

        client.put(b"third", b"night")
        third = night(cluster, store, metrics, SHORT_DAYS)
        kinds = [each["kind"] for each in third["snapshots"]]
        assert kinds == ["incremental", "full"]
        assert store.ids() == [third["snapshots"][1]["id"]]
        assert third["pruned"]["removed"] == [third["snapshots"][0]["id"], plan.id, full["id"]]
        assert_right(cluster, store, store.load(store.ids()[0]))

    values = dict(re.findall(r"^(\w+) (\S+)$", metrics.read_text(), re.MULTILINE))
    now_s = float(values["kvstore_snapshot_checked_timestamp_seconds"])
    assert not fires("KvstoreSnapshotMissing", values, now_s + 25 * HOUR_S)
    assert fires("KvstoreSnapshotMissing", values, now_s + 27 * HOUR_S), "the fourth night is missing"
    assert not fires("KvstoreSnapshotDamaged", values, now_s)


def owners(cluster: Cluster) -> set[str]:
    """Return the owners of some keys, as a client learns them that has just connected."""
    with Client(cluster.url + "?timeout=30s") as client:
        return {client.cluster.partition_of(b"key%05d" % number) for number in range(500)}


def fires(alert: str, values: dict[str, str], now_s: float) -> bool:
    """Evaluate the rule of an alert with the values of a metrics file. The rule may use comparisons only."""
    rules = yaml.safe_load((ROOT / "docs/monitoring/rules.yml").read_text(encoding="utf-8"))
    (text,) = [each["expr"] for group in rules["groups"] for each in group["rules"] if each["alert"] == alert]
    filled = re.sub(r"kvstore_\w+", lambda name: values[name[0]], text.replace("time()", repr(now_s)))
    assert re.fullmatch(r"[-0-9.e*>=< or]+", filled), filled
    return bool(eval(filled))
