"""One seed determines everything: a run that cannot be repeated is a bug in the simulation."""

import os
import subprocess
import sys

import pytest

from kvstore.env import File
from tests.sim.world import example

pytestmark = pytest.mark.sim

SEEDS = range(1, 6)


def digests(hash_seed: str) -> list[str]:
    """Return the digests of all seeds, computed in a separate process."""
    command = [sys.executable, "-m", "tests.sim.world.example", *map(str, SEEDS)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def run_all(seeds: range) -> None:
    for seed in seeds:
        example.run(seed)


def test_seed_gives_same_trace_in_every_process() -> None:
    first = digests("1")
    assert first == digests("2")
    assert len({line.split()[1] for line in first}) == len(SEEDS), "other seeds give other runs"


def test_seed_gives_same_trace_after_other_seeds_in_one_process() -> None:
    assert example.run(3) == [example.run(seed) for seed in (1, 2, 3)][-1]


@pytest.mark.parametrize("seed", range(100))
def test_answer_after_sync_survives_every_fault(seed: int) -> None:
    example.run(seed)


def test_answer_before_sync_is_lost_by_some_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_too_early(file: File, connection: example.Frames, payload: bytes, _: object) -> None:
        connection.send(payload)

    monkeypatch.setattr(example, "answer_when_synced", answer_too_early)
    with pytest.raises(AssertionError, match="has lost"):
        run_all(range(10))


def test_journal_that_trusts_page_cache_after_failed_sync_loses_some_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trust(file: File) -> int:
        return sum(len(frame) + 1 for frame in example.stored(file))

    monkeypatch.setattr(example, "renew", trust)
    with pytest.raises(AssertionError, match="has lost"):
        run_all(range(100))
