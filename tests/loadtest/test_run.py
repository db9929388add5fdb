"""A load test that cannot run says so in one line, before a cluster is started for it."""

from __future__ import annotations

import sys

import pytest

from loadtest import run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rate", "0"], "--rate: want more than 0"),
        (["--workload", "ycsb-z"], "--workload: want some of ycsb-a"),
        (["--keys-by", "luck"], "luck"),
        (["--seconds", "5"], "--warmup: want 0 to less than --seconds"),
    ],
)
def test_wrong_options_are_told_at_once(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    monkeypatch.delattr(run, "running_cluster")
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
