"""Short headless runs of Locust against a real cluster, through both endpoints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest

from kvstore.client import Client
from kvstore.devcluster.zookeeper import free_ports
from kvstore.loadtest.generator.workloads import Keyspace
from kvstore.loadtest.run import LOCUSTFILE
from tests.cluster.harness import Cluster, running_cluster
from tests.conftest import ROOT
from tests.loadtest.generator.headless import COMMAND, run_locust, started
from tests.waiting import wait_until_blocking

pytestmark = [pytest.mark.cluster]
KEYS = 200
OWN = ROOT / "tests" / "loadtest" / "generator" / "own_users.py"
BROKEN = ROOT / "tests" / "loadtest" / "generator" / "broken_users.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("loadtest")) as started:
        yield started


def run(cluster: Cluster, folder: Path, *options: str, file: Path = LOCUSTFILE) -> tuple[int, dict[str, Any], str, str]:
    """Return the exit code, the document, the page and the output."""
    words = ("--data-dir", str(cluster.local.data_dir), "--keys", str(KEYS), "--rate", "100", "--warmup", "1")
    return run_locust(folder, *words, *options, file=file)


def test_two_workers_report_a_kill_and_no_wrong_value(cluster: Cluster, tmp_path: Path) -> None:
    mixes = ("--workload", "ycsb-a,ycsb-d,ycsb-f,cas,ycsb-e", "--errors-max", "0.2")
    code, made, page, said = run(cluster, tmp_path, "--shape", "chaos", "--seconds", "18", "--processes", "2", *mixes)
    assert code == 0, said
    assert 0 < sum(line["count"] for line in made["operations"]) <= made["total"]["done"]
    assert max(point["users"] or 0 for point in made["timeline"]) == 20
    assert made["total"]["wrong"] == 0
    endpoints_and_operations = {(line["endpoint"], line["operation"]) for line in made["operations"]}
    for operation in ("read", "update", "insert", "read-modify-write", "compare-and-set", "scan"):
        assert {("grpc", operation), ("resp", operation)} <= endpoints_and_operations
    kill, start = made["events"]
    assert kill["what"].startswith("kill -9 n")
    assert start["outcome"].startswith("ready after")
    assert kill["max_ms"] > 2 * made["total"]["p50_ms"]
    assert page.count('data-event="1"') == page.count('data-event="2"') == 3
    assert kill["what"] in page
    cluster.wait_ready()


def test_value_that_was_changed_behind_its_back_fails_the_run(cluster: Cluster, tmp_path: Path) -> None:
    keys = [Keyspace(b"load/", KEYS, 1).record(number) for number in range(KEYS // 2)]  # even with few reads, some
    with Client(cluster.url) as client:
        for key, found in client.get_many(keys).items():  # loaded by the previous run
            client.put(key, found.value[:-1] + bytes((found.value[-1] ^ 1,)))
    options = ("--no-preload", "--seconds", "4", "--workload", "ycsb-c", "--keys-by", "uniform", "--errors-max", "1")
    code, made, page, said = run(cluster, tmp_path, *options)
    assert code == 1
    assert made["total"]["wrong"] > 0
    assert all("load/r/0000000000" in message and "checksum" in message for message in made["wrong"])
    assert {message.split()[0] for message in made["wrong"]} == {"grpc", "resp"}
    assert "reads returned wrong values" in page
    assert "reads returned wrong values" in said


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["alone", "workers"])
def test_user_that_breaks_fails_the_run(cluster: Cluster, tmp_path: Path, processes: tuple[str, ...]) -> None:
    options = ("--seconds", "4", "--workload", "ycsb-c", *processes, "RespUser", "BrokenUser")
    code, made, _, said = run(cluster, tmp_path, *options, file=BROKEN)
    assert code == 1, said
    (reason,) = made["verdict"]["reasons"]
    assert "nobody expects this" in reason
    assert "broken_users.py" in reason


def test_custom_workload_has_its_operations_in_the_report(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--seconds", "6", "--prefix", "own/", "--p99-ms", "look=60000,buy=60000", "Shop")
    code, made, _, said = run(cluster, tmp_path, *options, file=OWN)
    slow = "of the due operations were done, and the missing ones are in no percentile"  # this machine was busy
    assert code in (0, 3) or all(slow in reason for reason in made["verdict"]["reasons"]), said
    figures = {(line["endpoint"], line["operation"]): line for line in made["operations"]}
    assert figures.keys() == {("Shop", "look"), ("Shop", "buy")}
    assert figures["Shop", "look"]["count"] > figures["Shop", "buy"]["count"] > 0
    assert made["total"]["errors"] == made["total"]["wrong"] == 0
    with Client(cluster.url) as client:
        left = [int(item.value) for _, item in client.scan(prefix=b"own/item/")]
        assert (len(left), list(client.keys(prefix=b"own/r/"))) == (50, []), "its own keys, and no records"
    assert sum(left) <= 50 * 1_000_000 - figures["Shop", "buy"]["count"]


def test_workload_with_an_unknown_operation_is_refused_before_the_run(cluster: Cluster) -> None:
    command = [*COMMAND, "-f", str(OWN), "--data-dir", str(cluster.local.data_dir), "Careless"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "loadtest: Careless.operations names methods that do not exist: steal" in answer.stderr


def test_each_run_of_the_web_pages_is_reported_separately(cluster: Cluster, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    options = ("--data-dir", str(cluster.local.data_dir), "--report", str(tmp_path / "report.html"), "--seconds", "600")
    words = ("--keys", str(KEYS), "--rate", "50", "--warmup", "1", "--prefix", "pages/", "--errors-max", "1")
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--web-port",
        str(port),
    ]
    pages = f"http://127.0.0.1:{port}"

    def is_there() -> bool:
        try:
            return bool(urlopen(f"{pages}/", timeout=10).status == 200)
        except OSError:
            return False

    def has_run(seconds: str, report: Path) -> dict[str, Any]:
        started = json.load(urlopen(f"{pages}/swarm", urlencode({"seconds": seconds}).encode(), timeout=60))
        assert started["success"], started
        wait_until_blocking(report.exists, what=f"the report {report.name}")
        wait_until_blocking(lambda: '"verdict"' in report.read_text(), what="all of it")
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    with started([*command, *words, *options], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_blocking(is_there, what="Locust's pages")
            listening = [each for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
            assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
            shown = urlopen(f"{pages}/", timeout=10).read().decode()
            assert all(f'"{name}"' in shown for name in ("workload", "shape", "rate", "seconds"))
            first = has_run("6", tmp_path / "report.json")
            second = has_run("4", tmp_path / "report-2.json")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) in (0, 1, 3), "it stops at the first SIGTERM, with the code of its runs"
    assert [made["options"]["seconds"] for made in (first, second)] == [6, 4]
    assert all(made["total"]["done"] > 20 for made in (first, second)), "both have measured"
    assert all(made["total"]["wrong"] == 0 for made in (first, second))
    assert not any("ended after" in reason for made in (first, second) for reason in made["verdict"]["reasons"])
    assert len(second["timeline"]) <= 12, "nothing of the first run is in it"


def test_interrupted_run_is_reported_as_interrupted(cluster: Cluster, tmp_path: Path) -> None:
    """This happens when the workers of a master are lost."""
    options = ("--data-dir", str(cluster.local.data_dir), "--report", str(tmp_path / "report.html"), "--seconds", "600")
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--keys", str(KEYS), "--rate", "20", *options]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "All users spawned" in line)
        process.send_signal(signal.SIGINT)
        said += process.stderr.read()
    assert process.returncode == 1, said
    assert "of 600 s" in json.loads((tmp_path / "report.json").read_text())["verdict"]["reasons"][0]


def test_run_that_loses_a_worker_reports_it(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--data-dir", str(cluster.local.data_dir), "--report", str(tmp_path / "report.html"), "--seconds", "12")
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--keys", str(KEYS), "--rate", "20", "--processes", "2", *options]
    with started(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "Sending spawn jobs" in line)
        psutil.Process(process.pid).children()[0].kill()
        said += process.stderr.read()
    assert process.returncode == 1, said
    assert "1 of 2 workers were lost" in json.loads((tmp_path / "report.json").read_text())["verdict"]["reasons"]


@pytest.mark.parametrize(
    ("words", "says"), [((), "127.0.0.1:9"), (("--p99-ms", "look=5"), "--p99-ms: expected operations of read, ")]
)
def test_run_that_cannot_start_reports_why_in_one_line(words: tuple[str, ...], says: str) -> None:
    """A cluster that cannot be reached; a goal for an operation that no user has."""
    command = [*COMMAND, "-f", str(LOCUSTFILE), "--store", "kv://127.0.0.1:9?timeout=500ms", *words, "GrpcUser"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    *_, line = [each for each in answer.stderr.splitlines() if each.startswith("loadtest:")]
    assert says in line
