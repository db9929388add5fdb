"""A leader that the other replicas cannot reach loses the lead although its session lives, and only once; one observer
that cannot reach it changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.test_handover import epoch, led_by_preferred

pytestmark = pytest.mark.sim

GAP_S = 10.0
"""Promised: acknowledged writes go on within this time while two healthy nodes reach each other."""
SESSION_S = 600.0
"""Sessions of these runs: none ends by itself."""


def hide(stage: Stage, node: Node, callers: Iterable[Node], *, refuses: bool) -> None:
    """Let the callers connect to the node's server no more; it reaches everybody, and its bookie is reached."""
    stage.cluster.network.hide(node.config.resp, [each.name for each in callers], refuses=refuses)


async def longest_gap(stage: Stage, asked: Node, seconds: float) -> float:
    """Write through one node for so long; the longest time in which no write was acknowledged."""
    loop = asyncio.get_running_loop()
    last, longest, end = loop.time(), 0.0, loop.time() + seconds
    while loop.time() < end:
        done = await stage.put(asked)
        longest = max(longest, loop.time() - last)
        if done.status is Status.OK:
            last = loop.time()
        await asyncio.sleep(0.02)
    return longest


# docs/protocol.md P40
@pytest.mark.parametrize("refuses", [True, False])
def test_leader_that_others_cannot_reach_is_deposed_once(refuses: bool) -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        before, asked = epoch(stage), stage.others(first)[0]
        hide(stage, first, stage.others(first), refuses=refuses)
        assert await longest_gap(stage, asked, 40.0) < GAP_S
        assert stage.leader is not first
        assert epoch(stage) == before + 1, "it is neither given the lead back nor takes it"
        stage.cluster.network.show(first.config.resp)
        await led_by_preferred(stage)

    for seed in range(1, 4):
        play(story, replace(knobs(lead_back_s=1.0), session_s=SESSION_S), seed)


# docs/protocol.md P40
@pytest.mark.parametrize("refuses", [True, False])
def test_leader_stays_when_one_observer_cannot_reach_it(refuses: bool) -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        before, (blind, asked) = epoch(stage), stage.others(first)
        hide(stage, first, [blind], refuses=refuses)
        assert await longest_gap(stage, asked, 15.0) < 1.0
        assert (stage.leader, epoch(stage)) == (first, before)

    for seed in range(1, 4):
        play(story, replace(knobs(), session_s=SESSION_S), seed)


# docs/protocol.md P40
def test_leader_cut_from_the_other_servers_but_not_from_bookies_is_deposed() -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        before, others = epoch(stage), [each for each in stage.cluster.servers if each is not first]
        stage.cluster.network.split([first.name], [each.name for each in others])
        assert await longest_gap(stage, others[0], 30.0) < GAP_S
        assert (stage.leader in others, epoch(stage)) == (True, before + 1)

    for seed in range(1, 4):
        play(story, replace(knobs(lead_back_s=1.0), session_s=SESSION_S, bookies=3), seed)


# docs/protocol.md P40
def test_leader_whose_answers_are_lost_is_deposed() -> None:
    """It hears everybody, and nobody hears it."""

    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        others = [each for each in stage.cluster.servers if each is not first]
        for each in others:
            stage.cluster.network.cut_one_way(first.name, each.name)
        assert await longest_gap(stage, others[0], 30.0) < GAP_S
        assert stage.leader in others

    for seed in range(1, 4):
        play(story, replace(knobs(lead_back_s=1.0), session_s=SESSION_S, bookies=3), seed)


# docs/protocol.md P25
@pytest.mark.parametrize("refuses", [True, False])
def test_restarted_leader_that_nobody_reaches_does_not_take_its_lead_back(refuses: bool) -> None:
    """Its address has changed and nobody knows; the session of its former process lives on."""

    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        asked = stage.others(first)[0]
        hide(stage, first, stage.others(first), refuses=refuses)
        first.crash()
        first.start()
        assert await longest_gap(stage, asked, 30.0) < GAP_S
        assert stage.leader is not first

    for seed in range(1, 4):
        play(story, replace(knobs(lead_back_s=1.0), session_s=SESSION_S), seed)


# docs/protocol.md P40
def test_observer_that_stood_still_deposes_nobody() -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        before, observers = epoch(stage), stage.others(first)
        for seconds in (2.0, 4.0, 9.0):
            for each in observers:
                each.pause()
            await asyncio.sleep(seconds)
            for each in observers:
                each.resume()
            await asyncio.sleep(2.0)
        assert (stage.leader, epoch(stage)) == (first, before)

    for seed in range(1, 6):
        play(story, replace(knobs(), session_s=SESSION_S), seed)


def test_leader_that_reaches_no_bookie_is_replaced() -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        asked = next(each for each in stage.cluster.servers if each is not first)
        bookies = [each.name for each in stage.cluster.nodes if each not in stage.cluster.servers]
        stage.cluster.network.split([first.name], bookies)
        assert await longest_gap(stage, asked, 60.0) < GAP_S
        assert stage.leader is not first

    for seed in range(1, 4):
        play(story, replace(knobs(lead_back_s=1.0), session_s=SESSION_S, bookies=3), seed)
