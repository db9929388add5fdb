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
    assert [[word.strip() for word in line.split("|")[1:5]] for line in lines[2:]] == [
        ["1", "1", "ours", "ours"],
        ["1", "20", "ours", "ours"],
    ]
    for line in lines[2:]:
        rate, _, p50_ms, p99_ms, *_ = [float(word.replace(",", "")) for word in line.split("|")[5:-1]]
        assert rate > 0
        assert 0 < p50_ms <= p99_ms
