"""The benchmark of the log client, on real bookies."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.bench import log_client


@pytest.mark.needs_zookeeper
@pytest.mark.slow
async def test_each_client_writes_and_its_figures_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.interop.java.is_installed", lambda: False)
    await log_client.compare(tmp_path, in_flight=[1, 20], size=100, seconds=0.2, rounds=1, warm_s=0.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].split() for line in lines] == [
        ["1", "in", "flight,", "100", "B,", "ours"],
        ["20", "in", "flight,", "100", "B,", "ours"],
    ]
