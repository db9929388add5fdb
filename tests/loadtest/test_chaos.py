"""Chaos that cannot do what its plan says fails the run, and does and leaves nothing behind its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import gevent
import pytest

from loadtest import chaos as performing
from loadtest.chaos import Chaos
from loadtest.chaos_plan import KILL, SNAPSHOT, START, Fault
from tests.waiting import PATIENCE_S


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
