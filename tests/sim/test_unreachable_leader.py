"""A leader that the other replicas cannot reach loses leadership although its session lives, and only once. One
observer that cannot reach the leader changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.stories.stories_of_reach import (
    GAP_S,
    candidate_that_nobody_reaches,
    hide,
    leader_that_nobody_reaches,
    leader_that_one_does_not_reach,
    longest_gap,
    observers_that_stand_still,
    successor_that_few_reach,
    two_that_refuse_each_other,
)
from tests.sim.test_handover import epoch, led_by_preferred

pytestmark = pytest.mark.sim

SESSION_S = 600.0
"""Session timeout of these runs: no session ends on its own."""
CALM = knobs(lead_back_s=1.0, session_s=SESSION_S)
SPLIT = replace(CALM, bookies=3)
"""Servers and bookies on separate machines."""


# docs/protocol.md P40
@pytest.mark.parametrize("refuses", [True, False])
def test_leader_that_others_cannot_reach_is_deposed_once(refuses: bool) -> None:
    for seed in range(1, 4):
        play(partial(leader_that_nobody_reaches, refuses=refuses), CALM, seed)


# docs/protocol.md P40
@pytest.mark.parametrize("refuses", [True, False])
def test_leader_stays_when_one_observer_cannot_reach_it(refuses: bool) -> None:
    for seed in range(1, 4):
        play(partial(leader_that_one_does_not_reach, refuses=refuses), CALM, seed)


# docs/protocol.md P40
def test_leadership_does_not_alternate_between_two_that_refuse_each_other() -> None:
    for seed in range(1, 4):
        play(two_that_refuse_each_other, knobs(lead_back_s=1.0), seed)


# docs/protocol.md P40
def test_paused_observer_deposes_no_leader() -> None:
    for seed in range(1, 6):
        play(observers_that_stand_still, CALM, seed)


# docs/protocol.md P25
def test_candidate_that_others_cannot_reach_lets_another_lead() -> None:
    for seed in range(1, 4):
        play(candidate_that_nobody_reaches, knobs(lead_back_s=1.0), seed)


# docs/protocol.md P40
def test_leader_is_deposed_only_by_replica_that_a_majority_reaches() -> None:
    for seed in range(1, 4):
        play(successor_that_few_reach, CALM, seed)


# docs/protocol.md P40
def test_leader_cut_from_other_servers_but_not_from_bookies_is_deposed() -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        before, others = epoch(stage), [each for each in stage.cluster.servers if each is not first]
        stage.cluster.network.split([first.name], [each.name for each in others])
        assert await longest_gap(stage, others[0], 30.0) < GAP_S
        assert (stage.leader in others, epoch(stage)) == (True, before + 1)

    for seed in range(1, 4):
        play(story, SPLIT, seed)


# docs/protocol.md P40
def test_leader_whose_answers_are_lost_is_deposed() -> None:
    """It receives all requests, but its answers do not arrive."""

    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        others = [each for each in stage.cluster.servers if each is not first]
        for each in others:
            stage.cluster.network.cut_one_way(first.name, each.name)
        assert await longest_gap(stage, others[0], 30.0) < GAP_S
        assert stage.leader in others

    for seed in range(1, 4):
        play(story, SPLIT, seed)


# docs/protocol.md P25
@pytest.mark.parametrize("refuses", [True, False])
def test_restarted_leader_that_none_reaches_does_not_take_leadership_back(refuses: bool) -> None:
    """Its address has changed without notice, and the session of its former process lives on."""

    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        asked = stage.others(first)[0]
        hide(stage, first, stage.others(first), refuses=refuses)
        first.crash()
        first.start()
        assert await longest_gap(stage, asked, 30.0) < GAP_S
        assert stage.leader is not first

    for seed in range(1, 4):
        play(story, CALM, seed)


def test_leader_that_reaches_no_bookie_is_replaced() -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        asked = next(each for each in stage.cluster.servers if each is not first)
        bookies = [each.name for each in stage.cluster.nodes if each not in stage.cluster.servers]
        stage.cluster.network.split([first.name], bookies)
        assert await longest_gap(stage, asked, 60.0) < GAP_S
        assert stage.leader is not first

    for seed in range(1, 4):
        play(story, SPLIT, seed)
