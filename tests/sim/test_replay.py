"""One seed determines everything, also in a whole cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim import run

pytestmark = pytest.mark.sim

SEEDS = (5, 6)
"""Short runs."""


def traces(hash_seed: str, seeds: tuple[int, ...]) -> list[str]:
    """Return the traces of these seeds, computed in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.run", *map(str, seeds)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [line.partition("trace ")[2] for line in done.stdout.splitlines() if line.startswith("seed ")]


def test_seed_gives_same_trace_in_every_process_whatever_ran_before() -> None:
    first = traces("1", SEEDS)
    assert len(set(first)) == len(SEEDS), "other seeds give other runs"
    assert traces("2", SEEDS[::-1]) == first[::-1]


def test_help_names_trace_and_unknown_run_lists_known_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run.main(["--help"])
    assert "TRACE=1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run.main(["fault:no_such:7"])
    said = capsys.readouterr().err
    assert "expected a seed such as 17" in said
    assert "kill_leader" in said
    assert "a_ledger_is_rolled" in said
