"""Whole clusters under faults, one seed a run: nothing acknowledged is lost, no read lies, and all of it serves again.

`make sim SEED=n` plays one again, and a failure says which; `pytest --seed 1000` plays a hundred others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.sim.judges import probes
from tests.sim.judges.roads import ROADS
from tests.sim.run import Outcome, play, run
from tests.sim.strikes.faults import FAULTS

pytestmark = pytest.mark.sim

CHUNKS, SEEDS_PER_CHUNK = 3, 10
ROAD_SEEDS_MAX = 25


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What a node logs under faults is not worth its time; `make sim` shows it."""
    logger = logging.getLogger("kvstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_cluster_keeps_its_promises_under_any_faults(chunk: int, seed: int) -> None:
    first = seed + chunk * SEEDS_PER_CHUNK
    _refuse_idle_runs([run(each) for each in range(first, first + SEEDS_PER_CHUNK)])


def _refuse_idle_runs(outcomes: list[Outcome]) -> None:
    """A run in which nothing was asked, or nothing happened, proves nothing."""
    for outcome in outcomes:
        before, _, after = outcome.answered
        assert before > 0, f"nothing was answered before the faults: make sim SEED={outcome.seed}"
        assert after > 0, f"nothing was answered after the faults: make sim SEED={outcome.seed}"
    for phase, answered in zip(
        ("before", "during", "after"), zip(*(o.answered for o in outcomes), strict=True), strict=True
    ):
        assert sum(answered) > 10 * len(outcomes), f"only {sum(answered)} operations were answered {phase} the faults"
    assert sum(sum(outcome.struck.values()) for outcome in outcomes) > 2 * len(outcomes)


@pytest.mark.parametrize("name", ROADS)
def test_every_road_is_taken(name: str) -> None:
    """By a few seeds with the faults and knobs that lead there: chunks may run in several processes, so that none of
    them knows what all have met."""
    before = probes.hits[f"road: {name}"]
    for seed in range(ROAD_SEEDS_MAX):
        play(f"road:{name.replace(' ', '_')}:{seed}")
        if probes.hits[f"road: {name}"] > before:
            return
    pytest.fail(f"{ROAD_SEEDS_MAX} seeds did not take it")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_strikes_by_itself(name: str) -> None:
    """And its blow is survived, without any other."""
    before = probes.hits[f"fault.{name}"]
    for seed in range(ROAD_SEEDS_MAX):
        play(f"fault:{name}:{seed}")
        if probes.hits[f"fault.{name}"] > before:
            return
    pytest.fail(f"{ROAD_SEEDS_MAX} seeds were not struck by it")
