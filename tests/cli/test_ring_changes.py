"""`kvstore ring`: what is asked for at once that does not go together, and what the status says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import ring_changes
from kvstore.cli.ring_views import status_text
from kvstore.proto import admin_pb2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--add", "p4", "--add-count", "2"), "want the ids of new partitions, or --add-count"),
        (("plan", "--add", "p4", "--remove", "p1"), "not both at once"),
        (("add",), "want the ids of new partitions, or --count"),
        (("add", "p4", "--count", "2"), "want the ids of new partitions, or --count"),
        (("move", "p1"), "want --source and --share, or --first and --last"),
        (("throttle",), "want --mib-per-s, --parallel or both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_do_not_go_together_are_wrong_usage(arguments: tuple[str, ...], words: str) -> None:
    command = [sys.executable, "-m", "kvstore", "ring", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert words in answer.stderr.splitlines()[-1]


def test_that_moves_are_paused_is_said_also_while_there_are_none() -> None:
    assert "no moves (paused: `kvstore ring resume`)" in status_text(admin_pb2.RingStatusResponse(paused=True))
    assert status_text(admin_pb2.RingStatusResponse()).endswith("no moves")


def test_whoever_waits_for_moves_that_are_paused_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a script, too, where nothing else is said."""
    moves = [admin_pb2.MoveStatus(id=1)]
    looks = [admin_pb2.RingStatusResponse(moves=moves, paused=each) for each in (False, True, True)]
    looks.append(admin_pb2.RingStatusResponse())
    monkeypatch.setattr(ring_changes, "ring_status", lambda *_: looks.pop(0))
    monkeypatch.setattr(ring_changes.time, "sleep", lambda _: None)
    ring_changes._follow(Path("data"), None, None, quiet=True)
    assert (looks, capsys.readouterr().err.count("moves are paused")) == ([], 1)
