"""One seed explains everything, also of a whole cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.sim

SEEDS = (5, 6)
"""Short ones."""


def traces(hash_seed: str, seeds: tuple[int, ...]) -> list[str]:
    """What runs of these seeds say of themselves, in a process of their own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sim.run", *map(str, seeds)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [line.partition("trace ")[2] for line in done.stdout.splitlines() if line.startswith("seed ")]


def test_a_seed_gives_the_same_trace_in_every_process_whatever_ran_before_it() -> None:
    first = traces("1", SEEDS)
    assert len(set(first)) == len(SEEDS), "other seeds give other runs"
    assert traces("2", SEEDS[::-1]) == first[::-1]
