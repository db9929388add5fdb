"""Chaos that cannot do what its plan says fails the run, and does and leaves nothing behind its end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gevent
import pytest

from loadtest.generator import chaos as performing
from loadtest.generator.chaos import Chaos, chaos_of
from loadtest.generator.chaos_plan import KILL, SNAPSHOT, START, Fault
from loadtest.generator.options import Options
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from kvstore.devcluster.local import LocalCluster


def test_a_plan_that_breaks_is_a_failed_event(tmp_path: Path) -> None:
    """There is no cluster here to be killed."""
    chaos = Chaos(tmp_path, tmp_path, [Fault(0.0, KILL, "n1"), Fault(0.0, START, "n1")])
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    chaos.finish()
    assert [(event.what, event.is_failed) for event in chaos.events] == [("kill -9 n1", False), ("chaos broke", True)]
    assert "no cluster" in chaos.events[-1].outcome


def test_nothing_happens_after_a_run_that_ended_before_its_plan(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, tmp_path, [Fault(3_600.0, KILL, "n1")])
    chaos.start(time.time())
    gevent.sleep(0)  # it begins to wait
    chaos.finish()
    assert all(each.ready() for each in chaos._running)
    assert chaos.events == []


class Cluster:
    """Two nodes, of which one is not ready yet when it is asked about for the first time."""

    def __init__(self, pid: int) -> None:
        self._pid, self._asked = pid, 0

    def status(self) -> dict[str, Any]:
        self._asked += 1
        return {"nodes": [{"id": "n1", "pid": self._pid, "ready": True}, {"id": "n2", "ready": self._asked > 1}]}


@pytest.mark.parametrize(("kills", "is_failed"), [(1, [True]), (2, [False, False])])
def test_without_any_kill_the_skipped_ones_fail_the_run(kills: int, is_failed: list[bool], tmp_path: Path) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    chaos = Chaos(tmp_path, tmp_path, [])
    chaos._cluster = cast("LocalCluster", Cluster(victim.pid))
    for _ in range(kills):
        chaos._kill(Fault(0.0, KILL, "n1"))
    chaos._killed.clear()  # there is nothing to start again
    chaos.start(time.time())
    chaos.finish()
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    assert [event.is_failed for event in chaos.events] == is_failed
    assert chaos.events[0].outcome == "skipped: n2 not ready"


def test_chaos_refuses_to_measure_another_cluster_than_it_kills(tmp_path: Path) -> None:
    nodes = [{"id": "n1", "grpc": "127.0.0.1:1", "resp": "127.0.0.1:2"}]
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": nodes}))
    options = Options(shape="chaos", data_dir=tmp_path, report=tmp_path / "report.html")
    assert chaos_of(options).events == []
    for other in ({"store": "kv://127.0.0.1:7401"}, {"resp": "127.0.0.1:6401"}):
        with pytest.raises(ValueError, match="no --store, no --resp"):
            chaos_of(replace(options, **other))


@pytest.mark.parametrize("code", [0, 1])
def test_a_snapshot_is_gone_after_the_run(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def create(*words: str) -> subprocess.CompletedProcess[str]:
        folder = Path(words[words.index("--to") + 1])
        (folder / "data").mkdir(parents=True)
        made.append(folder)
        return subprocess.CompletedProcess(words, code, "", "")

    monkeypatch.setattr(performing, "_run", create)
    chaos = Chaos(tmp_path / "cluster", tmp_path / "reports", [Fault(0.0, SNAPSHOT)])
    chaos.start(time.time())
    gevent.joinall(chaos._running, timeout=PATIENCE_S)
    chaos.finish()
    assert [(event.what, event.is_failed) for event in chaos.events] == [(SNAPSHOT, code == 1)]
    (folder,) = made
    assert folder.parent == tmp_path / "reports", "beside the report: that is a real disk"
    assert list(folder.parent.iterdir()) == []
