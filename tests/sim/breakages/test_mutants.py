"""The simulated cluster notices each of the eleven breakages, and nothing where there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.sim.breakages.catalogue import MUTANTS, noticed
from tests.sim.breakages.mutants import ELEVEN

SEEDS = range(20)
pytestmark = [pytest.mark.sim]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("name", ELEVEN)
def test_a_breakage_is_noticed_and_only_that(name: str) -> None:
    found = noticed(name, SEEDS)
    assert found is not None, f"none of {len(SEEDS)} seeds noticed"
    for seed in range(found.seed + 1):
        MUTANTS[name].play(seed)
