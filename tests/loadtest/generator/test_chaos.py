"""Chaos that cannot follow its plan fails the run, and does nothing after its end."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gevent
import pytest

from kvstore.devcluster.local import LocalCluster
from kvstore.loadtest.generator import chaos as performing
from kvstore.loadtest.generator.chaos import Chaos, chaos_of
from kvstore.loadtest.generator.chaos_plan import ADD_PARTITION, KILL, SNAPSHOT, START, ChaosFault
from kvstore.loadtest.generator.options import Options
from tests.waiting import PATIENCE_S


def test_plan_that_breaks_is_a_failed_event(tmp_path: Path) -> None:
    """There is no cluster here to be killed."""
    chaos = Chaos(
        LocalCluster(tmp_path), tmp_path, tmp_path, [ChaosFault(0.0, KILL, "n1"), ChaosFault(0.0, START, "n1")]
    )
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    chaos.finish()
    assert [(event.what, event.is_failed) for event in chaos.events] == [("kill -9 n1", False), ("chaos failed", True)]
    assert "no cluster" in chaos.events[-1].outcome


def test_nothing_happens_after_a_run_that_ended_before_its_plan(tmp_path: Path) -> None:
    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [ChaosFault(3_600.0, KILL, "n1")])
    chaos.start(time.time())
    gevent.sleep(0)  # it begins to wait
    chaos.finish()
    assert all(each.ready() for each in chaos._running)
    assert chaos.events == []


class Cluster:
    """Two nodes, one of which is not ready when it is checked for the first time."""

    def __init__(self, pid: int) -> None:
        self._pid, self._asked = pid, 0

    def status(self) -> dict[str, Any]:
        self._asked += 1
        return {"nodes": [{"id": "n1", "pid": self._pid, "ready": True}, {"id": "n2", "ready": self._asked > 1}]}


@pytest.mark.parametrize(("kills", "is_failed"), [(1, [True]), (2, [False, False])])
def test_without_any_kill_the_skipped_ones_fail_the_run(kills: int, is_failed: list[bool], tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [])
            chaos._cluster = cast("LocalCluster", Cluster(victim.pid))
            for _ in range(kills):
                chaos._kill(ChaosFault(0.0, KILL, "n1"))
            chaos._killed.clear()  # no node needs a start
            chaos.start(time.time())
            chaos.finish()
        finally:
            victim.kill()
    assert [event.is_failed for event in chaos.events] == is_failed
    assert chaos.events[0].outcome == "skipped: n2 not ready"


def test_chaos_refuses_to_measure_another_cluster_than_it_kills(tmp_path: Path) -> None:
    nodes = [{"id": "n1", "grpc": "127.0.0.1:1", "resp": "127.0.0.1:2"}]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    options = Options(shape="chaos", data_dir=tmp_path, report=tmp_path / "report.html")
    assert chaos_of(options).events == []
    for other in ({"store": "kv://127.0.0.1:7401"}, {"resp": "127.0.0.1:6401"}):
        with pytest.raises(ValueError, match="omit --store and --resp"):
            chaos_of(replace(options, **other))


def test_partition_that_was_added_is_gone_after_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No existing partition is removed, and none that another process added before the run."""
    there = ["p1", "p2"]

    def ring(*words: str) -> subprocess.CompletedProcess[str]:
        if words[1] == "add":
            there.append("p7")
        elif words[1] == "remove":
            there.remove(words[2])
        made = json.dumps({"partitions": [{"id": each} for each in there]})
        return subprocess.CompletedProcess(words, 0, made, "")

    monkeypatch.setattr(performing, "_run", ring)
    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [ChaosFault(0.0, ADD_PARTITION)])
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    assert there == ["p1", "p2", "p7"]
    chaos.finish()
    assert there == ["p1", "p2"]
    assert [(event.what, event.is_failed) for event in chaos.events] == [
        (ADD_PARTITION, False),
        ("remove partition p7", False),
    ]


def test_partition_added_by_another_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["p1"]

    def ring(*words: str) -> subprocess.CompletedProcess[str]:
        if words[1] == "add":
            there.append("p2")
        elif words[1] == "remove":
            there.remove(words[2])
        return subprocess.CompletedProcess(words, 0, json.dumps({"partitions": [{"id": each} for each in there]}), "")

    monkeypatch.setattr(performing, "_run", ring)
    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [ChaosFault(0.0, ADD_PARTITION)])
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    there.append("p3")
    chaos.finish()
    assert there == ["p1", "p3"]


def test_no_partition_is_removed_where_none_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performing, "_run", lambda *words: pytest.fail(f"{words} were run"))
    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [])
    chaos.start(time.time())
    chaos.finish()
    assert chaos.events == []


@pytest.mark.parametrize("code", [0, 1])
def test_snapshot_is_gone_after_the_run(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def create(*words: str) -> subprocess.CompletedProcess[str]:
        folder = Path(words[words.index("--to") + 1])
        (folder / "data").mkdir(parents=True)
        made.append(folder)
        return subprocess.CompletedProcess(words, code, "", "")

    monkeypatch.setattr(performing, "_run", create)
    chaos = Chaos(
        LocalCluster(tmp_path / "cluster"), tmp_path / "cluster", tmp_path / "reports", [ChaosFault(0.0, SNAPSHOT)]
    )
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    chaos.finish()
    assert [(event.what, event.is_failed) for event in chaos.events] == [(SNAPSHOT, code == 1)]
    (folder,) = made
    assert folder.parent == tmp_path / "reports", "beside the report: that is a real disk"
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("outputs", [("", "{}"), ('{"partitions": [{"id": "p1"}]}', "")])
def test_ring_without_readable_partitions_fails_the_run(
    outputs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: no partition is added, because it could not be removed. After: the added one stayed without a message."""
    made: list[str] = []

    def ring(*words: str) -> subprocess.CompletedProcess[str]:
        made.append(words[1])
        return subprocess.CompletedProcess(words, 0, outputs[made.count("plan") - 1] if words[1] == "plan" else "", "")

    monkeypatch.setattr(performing, "_run", ring)
    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [ChaosFault(0.0, ADD_PARTITION)])
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    chaos.finish()
    assert made == (["plan", "add", "plan"] if outputs[0] else ["plan"])
    assert chaos.events[-1].is_failed
    assert "did not list the partitions" in chaos.events[-1].outcome


def test_node_that_cannot_be_started_fails_the_run_and_ends_nothing_else(tmp_path: Path) -> None:
    """There was no report: the end of the chaos raised the error of the first node's start."""

    class Broken(Cluster):
        def load(self) -> Any:
            raise OSError("no file of a cluster")

        def start_node(self, name: str) -> int:
            raise AssertionError(name)

    chaos = Chaos(LocalCluster(tmp_path), tmp_path, tmp_path, [])
    chaos._cluster = cast("LocalCluster", Broken(1))
    chaos._killed = {"n1", "n2"}
    chaos.start(time.time())
    chaos.finish()
    assert [(event.what, event.is_failed, event.outcome) for event in chaos.events] == [
        ("start n1", True, "not started: no file of a cluster"),
        ("start n2", True, "not started: no file of a cluster"),
    ]
