"""A disk of a cluster of real processes is lost: without any command, its ledgers get all their copies again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.meta.address import MetadataKind
from tests.cluster.harness import Cluster, running_cluster
from tests.commands import Done, kvstore

pytestmark = [pytest.mark.cluster]
KEYS = 300
WHOLE_S = 150.0


@pytest.fixture(
    scope="module", params=[MetadataKind.ZOOKEEPER, pytest.param(MetadataKind.ETCD, marks=pytest.mark.slow)]
)
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("autorecovery"), metadata=request.param) as started:
        for number in range(KEYS):
            started.redis("n1").set(f"k{number}", "x" * 100)
        yield started


def on(cluster: Cluster, *arguments: str) -> Done:
    return kvstore(*arguments, "--data-dir", str(cluster.local.data_dir))


def document(cluster: Cluster, *arguments: str) -> Any:
    answer = on(cluster, *arguments, "--json")
    assert answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def naming(cluster: Cluster, bookie: str) -> list[int]:
    return [each["id"] for each in document(cluster, "ledger", "list") if bookie in each["bookies"]]


def test_ledgers_of_a_lost_disk_are_repaired_without_a_command(cluster: Cluster) -> None:
    document(cluster, "autorecovery", "lost-bookie-delay", "3")
    lost = next(each["id"] for each in document(cluster, "bookie", "list") if each["id"].startswith("n3-"))
    assert naming(cluster, lost)
    cluster.kill("n3")
    shutil.rmtree(Path(cluster.file.node("n3").data_dir) / "bookie")
    cluster.start_node("n3")
    cluster.wait_ready()
    cluster.wait_until(lambda: not naming(cluster, lost), "no ledger names what is lost", WHOLE_S)
    cluster.wait_until(lambda: not document(cluster, "autorecovery", "list"), "no ledger is marked")
    made = [cluster.status(node)["autorecovery"] for node in cluster.ids]
    assert sum(each["copies_made"] for each in made) > 0
    cluster.wait_succeeds("fsck")
    for number in range(KEYS):
        assert cluster.redis("n2").get(f"k{number}") is not None


def test_give_up_changes_nothing_in_a_complete_ledger(cluster: Cluster) -> None:
    whole = next(each["id"] for each in document(cluster, "ledger", "list") if each["state"] == "CLOSED")

    def is_told_so() -> bool:  # a bookie that is late for an answer may have what is asked for
        answer = on(cluster, "ledger", "give-up", str(whole))
        return answer.returncode == 0 and "nothing is lost" in answer.stdout

    cluster.wait_until(is_told_so, "nothing is lost")
    for _ in range(5):  # a leader may close it in between, because it rolls or another one takes over
        written = next(each for each in document(cluster, "ledger", "list") if each["state"] == "OPEN")
        refused = on(cluster, "ledger", "give-up", str(written["id"]), "--yes")
        if refused.returncode:
            break
    assert refused.returncode == 1
    assert "has a leader" in refused.stderr


def test_separate_worker_runs_until_it_is_stopped(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "kvstore", "autorecovery", "run", "--json"]
    with subprocess.Popen(
        [*command, "--data-dir", str(cluster.local.data_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        said = ""
        while not said.endswith("}\n") and (line := running.stdout.readline()):
            said += line
        if not said.endswith("}\n"):
            pytest.fail(f"it ended at once: {said} {running.communicate()[1]}")
        assert json.loads(said)["worker"].startswith("autorecovery-")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
