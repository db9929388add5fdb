"""Whole clusters under faults, one seed per run: nothing acknowledged is lost, no read lies, and everything serves
again.

`make sim SEED=n` repeats a run, and a failure names its seed; `pytest --seed 1000` plays a hundred other seeds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from kvstore.partition.state.commands import Code, Flag
from kvstore.partition.state.traits import INTERNAL
from tests.sim.judges import probes, reach
from tests.sim.judges.code_paths import CODE_PATHS
from tests.sim.run import Outcome, play, run
from tests.sim.strikes.faults import FAULTS

pytestmark = pytest.mark.sim

CHUNKS, SEEDS_PER_CHUNK = 2, 10
ROAD_SEEDS_MAX = 25
FOUND = {"a snapshot is installed": 7, "the lead is handed back": 2, "damaged_replica": 1, "disk_filled_and_freed": 3}
"""Seeds of the paths and faults that seed 0 does not meet. If these seeds no longer meet them, the others are
played."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Suppress the logs of nodes under faults to save time; `make sim` shows them."""
    logger = logging.getLogger("kvstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("chunk", range(1, CHUNKS))
def test_cluster_keeps_its_promises_under_any_faults(chunk: int, seed: int) -> None:
    first = seed + chunk * SEEDS_PER_CHUNK
    _refuse_idle_runs([run(each) for each in range(first, first + SEEDS_PER_CHUNK)])


def test_first_runs_keep_their_promises_and_cover_paths_and_operations(seed: int) -> None:
    """Seeds together take every common path, every fast path and every operation: what no workload reaches is tested by
    no run. Most are covered by the first seeds, which are judged like those of the other chunks. Other seeds are played
    only for what these missed."""
    paths = {name: probes.hits[f"path: {name}"] for name, code_path in CODE_PATHS.items() if not code_path.is_rare}
    before = reach.taken()
    outcomes = [run(each) for each in range(seed, seed + SEEDS_PER_CHUNK)]
    _refuse_idle_runs(outcomes)
    operations = sum((outcome.asked for outcome in outcomes), Counter[str]())

    def left() -> list[str]:
        untaken = [name for name, hits in paths.items() if probes.hits[f"path: {name}"] == hits]
        return [*untaken, *reach.PLAIN.missed(operations, reach.taken() - before, Counter())]

    for each in range(seed + SEEDS_PER_CHUNK, seed + ROAD_SEEDS_MAX):
        if not left():
            return
        operations += run(each).asked
    assert left() == [], f"{ROAD_SEEDS_MAX} seeds did not take these"


def _refuse_idle_runs(outcomes: list[Outcome]) -> None:
    """Fail if a run had no operations or no faults: such a run proves nothing."""
    for outcome in outcomes:
        before, _, after = outcome.answered
        assert before > 0, f"nothing was answered before the faults: make sim SEED={outcome.seed}"
        assert after > 0, f"nothing was answered after the faults: make sim SEED={outcome.seed}"
    for phase, answered in zip(
        ("before", "during", "after"), zip(*(o.answered for o in outcomes), strict=True), strict=True
    ):
        assert sum(answered) > 10 * len(outcomes), f"only {sum(answered)} operations were answered {phase} the faults"
    assert sum(sum(outcome.struck.values()) for outcome in outcomes) > 2 * len(outcomes)


def _seeds(*first: int) -> list[int]:
    """Return all seeds of the search, those first in which the path was found last."""
    return [*first, *(seed for seed in range(ROAD_SEEDS_MAX) if seed not in first)]


def test_every_flag_and_level_is_requested() -> None:
    """A new operation or option must be in the table of what runs have to cover."""
    flags = {flag for each in reach.FLAGS.values() for flag in each}
    assert flags == {each for each in Flag if each is not Flag.NONE}
    assert {name.partition(" ")[0] for name in reach.OPERATIONS} >= {code.name for code in set(Code) - INTERNAL}


@pytest.mark.parametrize("name", [name for name, code_path in CODE_PATHS.items() if code_path.is_rare])
def test_every_rare_path_is_taken(name: str) -> None:
    """The run uses the faults and knobs that lead there."""
    before = probes.hits[f"path: {name}"]
    for seed in _seeds(FOUND.get(name, 0)):
        play(f"path:{name.replace(' ', '_')}:{seed}")
        if probes.hits[f"path: {name}"] > before:
            return
    pytest.fail(f"{ROAD_SEEDS_MAX} seeds did not take it")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_strikes_on_its_own(name: str) -> None:
    """The cluster survives the fault, without any other fault."""
    before = probes.hits[f"fault.{name}"]
    for seed in _seeds(FOUND.get(name, 0)):
        play(f"fault:{name}:{seed}")
        if probes.hits[f"fault.{name}"] > before:
            return
    pytest.fail(f"{ROAD_SEEDS_MAX} seeds were not struck by it")
