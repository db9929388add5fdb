"""Short headless runs of Locust against a real cluster, through both doors."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.client import Client
from loadtest.generator.workloads import Keyspace
from tests.cluster.harness import Cluster, running_cluster
from tests.conftest import ROOT
from tests.loadtest.generator.headless import COMMAND, LOCUSTFILE, run_locust

pytestmark = [pytest.mark.cluster]
KEYS = 200
BROKEN = ROOT / "tests" / "loadtest" / "generator" / "broken_users.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("loadtest")) as started:
        yield started


def run(cluster: Cluster, folder: Path, *options: str, file: Path = LOCUSTFILE) -> tuple[int, dict[str, Any], str, str]:
    """Exit code, document, page, and what was said."""
    words = ("--data-dir", str(cluster.local.data_dir), "--keys", str(KEYS), "--rate", "100", "--warmup", "1")
    return run_locust(folder, *words, *options, file=file)


def test_a_kill_is_marked_in_the_report_of_two_workers_and_no_value_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    mixes = ("--workload", "ycsb-a,ycsb-d,ycsb-f,cas,ycsb-e", "--errors-max", "0.2")
    code, made, page, said = run(cluster, tmp_path, "--shape", "chaos", "--seconds", "18", "--processes", "2", *mixes)
    assert code == 0, said
    assert 1_000 < sum(line["count"] for line in made["operations"]) <= made["total"]["done"]
    assert max(point["users"] or 0 for point in made["timeline"]) == 20
    assert made["total"]["wrong"] == 0
    doors_and_operations = {(line["door"], line["operation"]) for line in made["operations"]}
    for operation in ("read", "update", "insert", "read-modify-write", "compare-and-set", "scan"):
        assert {("grpc", operation), ("resp", operation)} <= doors_and_operations
    kill, start = made["events"]
    assert kill["what"].startswith("kill -9 n")
    assert start["outcome"].startswith("ready after")
    assert kill["max_ms"] > 2 * made["total"]["p50_ms"]
    assert page.count('data-event="1"') == page.count('data-event="2"') == 3
    assert kill["what"] in page
    cluster.wait_ready()


def test_a_value_that_was_changed_behind_its_back_fails_the_run(cluster: Cluster, tmp_path: Path) -> None:
    keys = [Keyspace(b"load/", KEYS, 1).record(number) for number in range(20)]
    with Client(cluster.url) as client:
        for key, found in client.get_many(keys).items():  # loaded by the run before
            client.put(key, found.value[:-1] + bytes((found.value[-1] ^ 1,)))
    options = ("--no-preload", "--seconds", "4", "--workload", "ycsb-c", "--keys-by", "uniform", "--errors-max", "1")
    code, made, page, said = run(cluster, tmp_path, *options)
    assert code == 1
    assert made["total"]["wrong"] > 0
    assert all("load/r/0000000000" in told and "checksum" in told for told in made["wrong"])
    assert {told.split()[0] for told in made["wrong"]} == {"grpc", "resp"}
    assert "reads gave wrong values" in page
    assert "reads gave wrong values" in said


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["alone", "workers"])
def test_a_user_that_breaks_fails_the_run(cluster: Cluster, tmp_path: Path, processes: tuple[str, ...]) -> None:
    options = ("--seconds", "4", "--workload", "ycsb-c", *processes, "RespUser", "BrokenUser")
    code, made, _, said = run(cluster, tmp_path, *options, file=BROKEN)
    assert code == 1, said
    (reason,) = made["verdict"]["reasons"]
    assert "nobody expects this" in reason
    assert "broken_users.py" in reason


def test_a_run_that_is_interrupted_says_so(cluster: Cluster, tmp_path: Path) -> None:
    """As one does whose workers are gone."""
    options = ("--data-dir", str(cluster.local.data_dir), "--report", str(tmp_path / "report.html"), "--seconds", "600")
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--keys", str(KEYS), "--rate", "20", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "All users spawned" in line)
        process.send_signal(signal.SIGINT)
        said += process.stderr.read()
    assert process.returncode == 1, said
    assert "of 600 s" in json.loads((tmp_path / "report.json").read_text())["verdict"]["reasons"][0]


def test_a_run_that_loses_a_worker_says_so(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--data-dir", str(cluster.local.data_dir), "--report", str(tmp_path / "report.html"), "--seconds", "12")
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--keys", str(KEYS), "--rate", "20", "--processes", "2", *options]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "All users spawned" in line)
        psutil.Process(process.pid).children()[0].kill()
        said += process.stderr.read()
    assert process.returncode == 1, said
    assert "1 of 2 workers were lost" in json.loads((tmp_path / "report.json").read_text())["verdict"]["reasons"]


def test_an_unreachable_cluster_is_told_in_one_line() -> None:
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--store", "kv://127.0.0.1:9?timeout=500ms", "GrpcUser"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    (line,) = [each for each in answer.stderr.splitlines() if each.startswith("loadtest:")]
    assert "127.0.0.1:9" in line
