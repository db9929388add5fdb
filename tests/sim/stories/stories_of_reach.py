"""Stories of leaders that others cannot reach, and of nodes that cannot write. Each raises what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage
from tests.sim.test_handover import epoch, led_by_preferred, note_leaders

GAP_S = 10.0
"""Promised: acknowledged writes go on within this time while two healthy nodes reach each other."""


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


async def leader_that_nobody_reaches(stage: Stage, *, refuses: bool = False) -> None:
    """It loses the lead once, and gets it back when its address is right again."""
    first = await led_by_preferred(stage)
    before, asked = epoch(stage), stage.others(first)[0]
    hide(stage, first, stage.others(first), refuses=refuses)
    assert await longest_gap(stage, asked, 40.0) < GAP_S
    assert stage.leader is not first
    assert epoch(stage) == before + 1, "it is neither given the lead back nor takes it"
    stage.cluster.network.show(first.config.resp)
    await led_by_preferred(stage)


async def leader_that_one_does_not_reach(stage: Stage, *, refuses: bool = True) -> None:
    """One observer deposes nobody."""
    first = await led_by_preferred(stage)
    before, (blind, asked) = epoch(stage), stage.others(first)
    hide(stage, first, [blind], refuses=refuses)
    assert await longest_gap(stage, asked, 15.0) < 1.0
    assert (stage.leader, epoch(stage)) == (first, before)


async def two_that_refuse_each_other(stage: Stage) -> None:
    """The third replica is down, so nobody contradicts a refusal. The lead changes once, and writes continue."""
    first = await led_by_preferred(stage)
    second, third = stage.others(first)
    third.crash()
    await asyncio.sleep(8.0)
    seen = note_leaders(stage)
    hide(stage, first, [second], refuses=True)
    hide(stage, second, [first], refuses=True)
    assert await longest_gap(stage, second, 20.0) < GAP_S
    assert seen == [second.name]


async def observers_that_stand_still(stage: Stage) -> None:
    """They have heard nobody, and that says nothing about the leader."""
    first = await led_by_preferred(stage)
    before, observers = epoch(stage), stage.others(first)
    for seconds in (2.0, 4.0, 4.0, 4.0, 9.0):
        for each in observers:
            each.pause()
        hide(stage, first, observers, refuses=False)  # their links break while they stand still
        stage.cluster.network.show(first.config.resp)
        await asyncio.sleep(seconds)
        for each in observers:
            each.resume()
        await asyncio.sleep(2.0)
    assert (stage.leader, epoch(stage)) == (first, before)


async def candidate_that_nobody_reaches(stage: Stage) -> None:
    """The leader dies, and the replica that stands first cannot be reached: the third one leads, once the leader's
    session has ended, because only the unreachable replica could confirm that the leader is gone."""
    first = await led_by_preferred(stage)
    hide(stage, first, stage.others(first), refuses=False)
    second = await stage.until_led_by_another(first)
    await asyncio.sleep(5.0)
    third = next(each for each in stage.others(first) if each is not second)
    seen = note_leaders(stage)
    second.crash()
    assert await longest_gap(stage, third, 20.0) < GAP_S
    assert first.id not in seen, "it does not stand while another one can"
    assert stage.leader is third


async def successor_that_few_reach(stage: Stage) -> None:
    """One of the two that do not reach the leader is not reached by the other: it deposes nobody, because it would be
    deposed next. The other one cannot ask it."""
    first = await led_by_preferred(stage)
    before, (deaf, heard) = epoch(stage), stage.others(first)
    hide(stage, first, [deaf, heard], refuses=False)
    hide(stage, deaf, [first, heard], refuses=False)
    await asyncio.sleep(20.0)
    assert (stage.leader, epoch(stage)) == (first, before)


async def leader_without_inodes(stage: Stage) -> None:
    """It was handed the lead back every three seconds, and failed for ten."""
    first = await led_by_preferred(stage)
    asked, pid = stage.others(first)[0], first.sim.process
    first.use_up_inodes()
    assert await longest_gap(stage, asked, 40.0) < GAP_S
    assert stage.leader is not first
    before = epoch(stage)
    assert await longest_gap(stage, asked, 20.0) < 1.0
    assert epoch(stage) == before, "nobody tries again what cannot succeed"
    first.free_inodes()
    await led_by_preferred(stage)
    assert first.sim.process is pid, "the process has not ended"


async def candidate_without_inodes(stage: Stage) -> None:
    """The leader dies, and the replica whose turn it is cannot write: it does not stand."""
    first = await led_by_preferred(stage)
    await stage.put_until_done(first)
    await asyncio.sleep(2.0)  # all have published the same
    replicas = stage.cluster.ring.partitions[stage.cluster.partitions[0]].replicas
    second, third = (next(node for node in stage.cluster.nodes if node.id == each) for each in replicas[1:])
    second.use_up_inodes()
    seen = note_leaders(stage)
    first.crash()
    assert await longest_gap(stage, third, 8.0) < GAP_S
    assert second.id not in seen
    second.free_inodes()
