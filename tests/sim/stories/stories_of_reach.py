"""Stories of leaders that others cannot reach, and of nodes that cannot write. Each raises the failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage
from tests.sim.test_handover import epoch, led_by_preferred, note_leaders

GAP_S = 10.0
"""Promised maximum gap in seconds between acknowledged writes while two healthy nodes reach each other."""


def hide(stage: Stage, node: Node, callers: Iterable[Node], *, refuses: bool) -> None:
    """Stop the callers from connecting to the node's server. The node still reaches all others, and its bookie is
    still reachable."""
    stage.cluster.network.hide(node.config.resp, [each.name for each in callers], refuses=refuses)


async def longest_gap(stage: Stage, asked: Node, seconds: float) -> float:
    """Write through one node for `seconds` and return the longest time in seconds without an acknowledged write."""
    loop = asyncio.get_running_loop()
    last, longest, end = loop.time(), 0.0, loop.time() + seconds
    while loop.time() < end:
        done = await stage.put(asked)
        longest = max(longest, loop.time() - last)
        if done.status is Status.OK:
            last = loop.time()
        await asyncio.sleep(0.1)
    return longest


async def leader_that_nobody_reaches(stage: Stage, *, refuses: bool = False) -> None:
    """The leader loses leadership once, and gets it back when its address is right again."""
    first = await led_by_preferred(stage)
    before, asked = epoch(stage), stage.others(first)[0]
    hide(stage, first, stage.others(first), refuses=refuses)
    assert await longest_gap(stage, asked, 40.0) < GAP_S
    assert stage.leader is not first
    assert epoch(stage) == before + 1, "it neither gets leadership back nor takes it"
    stage.cluster.network.show(first.config.resp)
    await led_by_preferred(stage)


async def leader_that_one_does_not_reach(stage: Stage, *, refuses: bool = True) -> None:
    """One observer alone does not depose a leader."""
    first = await led_by_preferred(stage)
    before, (blind, asked) = epoch(stage), stage.others(first)
    hide(stage, first, [blind], refuses=refuses)
    assert await longest_gap(stage, asked, 15.0) < 1.0
    assert (stage.leader, epoch(stage)) == (first, before)


async def two_that_refuse_each_other(stage: Stage) -> None:
    """The third replica is down, so no replica contradicts a refusal. The leader changes once, and writes continue."""
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
    """The observers have received no answer while they were paused, which says nothing about the leader."""
    first = await led_by_preferred(stage)
    before, observers = epoch(stage), stage.others(first)
    for seconds in (2.0, 4.0, 4.0, 4.0, 9.0):
        for each in observers:
            each.pause()
        hide(stage, first, observers, refuses=False)  # their links break while they are paused
        stage.cluster.network.show(first.config.resp)
        await asyncio.sleep(seconds)
        for each in observers:
            each.resume()
        await asyncio.sleep(2.0)
    assert (stage.leader, epoch(stage)) == (first, before)


async def candidate_that_nobody_reaches(stage: Stage) -> None:
    """The leader dies, and the preferred successor cannot be reached. The third replica leads once the leader's
    session has ended, because only the unreachable replica could confirm that the leader is gone."""
    first = await led_by_preferred(stage)
    hide(stage, first, stage.others(first), refuses=False)
    second = await stage.until_led_by_another(first)
    await asyncio.sleep(5.0)
    third = next(each for each in stage.others(first) if each is not second)
    seen = note_leaders(stage)
    second.crash()
    assert await longest_gap(stage, third, 20.0) < GAP_S
    assert first.id not in seen, "it does not run for election while another one can"
    assert stage.leader is third


async def successor_that_few_reach(stage: Stage) -> None:
    """Two replicas do not reach the leader, and one of them is not reached by the other. It deposes no leader,
    because it would be deposed next. The other replica cannot ask it."""
    first = await led_by_preferred(stage)
    before, (deaf, heard) = epoch(stage), stage.others(first)
    hide(stage, first, [deaf, heard], refuses=False)
    hide(stage, deaf, [first, heard], refuses=False)
    await asyncio.sleep(20.0)
    assert (stage.leader, epoch(stage)) == (first, before)


async def leader_without_inodes(stage: Stage) -> None:
    """A former version handed leadership back to the node every three seconds, and the node failed for ten."""
    first = await led_by_preferred(stage)
    asked, pid = stage.others(first)[0], first.sim.process
    first.use_up_inodes()
    assert await longest_gap(stage, asked, 40.0) < GAP_S
    assert stage.leader is not first
    before = epoch(stage)
    assert await longest_gap(stage, asked, 20.0) < 1.0
    assert epoch(stage) == before, "no replica repeats a hopeless attempt"
    first.free_inodes()
    await led_by_preferred(stage)
    assert first.sim.process is pid, "the process has not ended"


async def candidate_without_inodes(stage: Stage) -> None:
    """The leader dies, and the next candidate cannot write: it does not run for election."""
    first = await led_by_preferred(stage)
    await stage.put_until_done(first)
    await asyncio.sleep(2.0)  # all have published the same position
    replicas = stage.cluster.ring.partitions[stage.cluster.partitions[0]].replicas
    second, third = (next(node for node in stage.cluster.nodes if node.id == each) for each in replicas[1:])
    second.use_up_inodes()
    seen = note_leaders(stage)
    first.crash()
    assert await longest_gap(stage, third, 8.0) < GAP_S
    assert second.id not in seen
    second.free_inodes()
