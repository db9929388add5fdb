"""Whole clusters under faults, one seed a run: nothing acknowledged is lost, no read lies, and all of it serves again.

`make sim SEED=n` plays one again; `pytest --seed 1000` plays three hundred others.

Not collected by `make test` yet: `pytest tests/sim/cluster_seeds.py` runs it. Some chunks miss a road that they must
take, and runs that end in the middle leave coroutines whose warnings count as errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim import probes
from tests.sim.knobs import hinted
from tests.sim.roads import ROADS
from tests.sim.run import Outcome, run

pytestmark = pytest.mark.sim

CHUNKS, SEEDS_PER_CHUNK = 30, 10
RARE_SEEDS_MAX = 25


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What a node logs under faults is not worth its time; `make sim` shows it."""
    logger = logging.getLogger("kvstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_cluster_keeps_its_promises_under_any_faults(chunk: int, seed: int) -> None:
    before = Counter(probes.hits)
    first = seed + chunk * SEEDS_PER_CHUNK
    outcomes = [run(each) for each in range(first, first + SEEDS_PER_CHUNK)]
    _refuse_idle_runs(outcomes)
    taken = probes.hits - before
    missed = [name for name, road in ROADS.items() if not road.is_rare and not taken[f"road: {name}"]]
    assert not missed, f"seeds {first} to {first + SEEDS_PER_CHUNK - 1} took none of these roads: {missed}"


def _refuse_idle_runs(outcomes: list[Outcome]) -> None:
    """A run in which nothing was asked, or nothing happened, proves nothing."""
    for outcome in outcomes:
        before, _, after = outcome.answered
        assert before > 0, f"seed {outcome.seed} answered nothing before the faults"
        assert after > 0, f"seed {outcome.seed} answered nothing after the faults"
    for phase, answered in zip(
        ("before", "during", "after"), zip(*(o.answered for o in outcomes), strict=True), strict=True
    ):
        assert sum(answered) > 10 * len(outcomes), f"only {sum(answered)} operations were answered {phase} the faults"
    assert sum(sum(outcome.struck.values()) for outcome in outcomes) > 2 * len(outcomes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, road in ROADS.items() if road.is_rare])
def test_the_rare_roads_are_taken_too(name: str) -> None:
    road = ROADS[name]
    for seed in range(RARE_SEEDS_MAX):
        before = probes.hits[f"road: {name}"]
        run(seed, hinted(seed, road.faults, road.hints))
        if probes.hits[f"road: {name}"] > before:
            return
    pytest.fail(f"{RARE_SEEDS_MAX} seeds did not take it")
