"""Pauses of a machine that its own clock does not see, as when a guest moves to another host (docs/protocol.md,
P32)."""

from __future__ import annotations

import pytest

from kvstore.partition.config import PartitionConfig
from tests.sim.stories.scenarios import knobs, play
from tests.sim.stories.stories import zombie_whose_clock_stood_still
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

LIMIT_MS = 250
"""The limit in docs/how-to/keep-clocks-right.md."""
SEEDS = (3, 4)
"""Seeds in which a pause beyond the limit gives a stale read."""


def test_limit_equals_documented_limit() -> None:
    assert PartitionConfig().hidden_pause_ms == LIMIT_MS


@pytest.mark.parametrize("lease_ms", [100, 400, 1000])
def test_read_is_never_older_than_write_within_limit(lease_ms: int) -> None:
    for seed in SEEDS:
        play(zombie_whose_clock_stood_still(LIMIT_MS / 1000), knobs(lease_ms=lease_ms), seed)


def test_pause_of_a_second_is_tolerated_with_limit_of_a_second() -> None:
    assert not any(is_stale(knobs(lease_ms=400, hidden_pause_ms=1000), 1000, seed) for seed in SEEDS)


def test_pause_of_a_quarter_second_gives_stale_read_without_limit() -> None:
    seeds = (*SEEDS, *range(5, 15))  # in case the first seeds no longer show it
    assert any(is_stale(knobs(lease_ms=400, hidden_pause_ms=0), LIMIT_MS, seed) for seed in seeds)


def is_stale(chosen: Knobs, hidden_ms: int, seed: int) -> bool:
    try:
        play(zombie_whose_clock_stood_still(hidden_ms / 1000), chosen, seed)
    except AssertionError as error:
        if "fits the answer" in str(error):
            return True
        raise
    return False
