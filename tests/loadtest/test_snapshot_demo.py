"""The demo of snapshots measures on the disk of the working directory, and leaves no file there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from loadtest import snapshot_demo


def test_demo_that_fails_leaves_no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used: list[Path] = []

    def run(demo: snapshot_demo.Demo) -> bool:
        (demo._directory / "data").mkdir()
        used.append(demo._directory)
        raise Unavailable("n2 ended while starting")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshot_demo.Demo, "run", run)
    monkeypatch.setattr(sys, "argv", ["snapshot_demo"])
    with pytest.raises(SystemExit, match="snapshot demo: n2 ended while starting"):
        snapshot_demo.main()
    (folder,) = used
    assert folder.parent == tmp_path / "reports"
    assert list(folder.parent.iterdir()) == []
