"""A load test or drill that cannot run says so in one line, before a cluster is started for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from loadtest import drill, ring_drill, run


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


@pytest.mark.parametrize(
    ("module", "words"),
    [(drill, []), (drill, ["--nemesis"]), (ring_drill, [])],
)
def test_a_drill_of_which_nothing_is_wanted_is_no_drill_that_was_passed(
    module: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["drill", "--only", "kils", *words])
    for name in ("run_drill", "run_nemesis"):
        monkeypatch.setattr(module, name, lambda **_: True, raising=False)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    assert "kils" in capsys.readouterr().err
