"""Nodes that hang in part, in the simulation: as stories, and among other faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.run import run
from tests.sim.stories.scenarios import Story, knobs, play
from tests.sim.stories.stories_of_liveness import (
    candidate_whose_engine_is_wedged,
    directory_of_two_that_hangs,
    leader_that_reaches_no_other_bookie,
    leader_whose_disk_hangs,
    leader_whose_engine_is_wedged,
    leader_whose_loop_is_blocked,
)
from tests.sim.strikes.knobs import hinted

pytestmark = pytest.mark.sim


# docs/protocol.md P45
@pytest.mark.parametrize("story", [leader_whose_loop_is_blocked, leader_whose_disk_hangs])
@pytest.mark.parametrize("seed", range(3))
def test_other_clients_write_in_time_when_a_leader_hangs(story: Story, seed: int) -> None:
    play(story, knobs(), seed)


# docs/protocol.md P41, P46, G13
@pytest.mark.parametrize(
    "story", [leader_whose_engine_is_wedged, candidate_whose_engine_is_wedged, leader_that_reaches_no_other_bookie]
)
@pytest.mark.parametrize("seed", range(3))
def test_other_clients_write_in_time_when_leader_acknowledges_nothing(story: Story, seed: int) -> None:
    play(story, knobs(lead_back_s=1.0), seed)


# docs/protocol.md B24
@pytest.mark.parametrize("seed", range(3))
def test_bookie_abandons_one_directory_when_its_disk_hangs(seed: int) -> None:
    play(directory_of_two_that_hangs, replace(knobs(), directories=2), seed)


# docs/protocol.md P45
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_when_nodes_hang_among_other_faults(seed: int) -> None:
    faults = ("blocked_loop", "hung_disk", "wedged_engine", "kill_leader", "metadata_cut")
    run(seed, hinted(seed, faults, {"chaos_s": 15.0}))
