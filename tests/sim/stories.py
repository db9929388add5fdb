"""Stories that a store has to survive, and in which breakages show that random runs meet rarely. Several suites play
them; scenarios.py has the stage."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sim.nodes import Node
from tests.sim.operations import Status
from tests.sim.scenarios import Stage


async def zombie_reads(stage: Stage) -> None:
    """The leader is cut from the metadata store and loses its session, then its writes stop. It answers reads for as
    long as it may, while another takes over and writes."""
    old = stage.leader
    await stage.put(old)
    _unseat_for_good(stage, old)
    await _read_here_write_there(stage, old, 6.0)
    stage.cluster.metadata.mend(old.name)


async def acks_under_way(stage: Stage) -> None:
    """The same while a write is stored on other bookies and the leader has not heard of it: whoever takes over finds
    it, and must not show it while the old leader may still answer from before it."""
    old = stage.leader
    await stage.put(old)
    for other in stage.others(old):
        stage.world.network.cut_one_way(other.name, old.name)
    under_way = stage.spawn(stage.put(old))
    await asyncio.sleep(0.005)
    _unseat_for_good(stage, old)
    await _read_here_write_there(stage, old, 4.0)
    stage.world.network.heal()
    stage.cluster.metadata.mend(old.name)
    await under_way


async def wiped_bookie_answers(stage: Stage) -> None:
    """A write is on the leader's bookie and on one other, whose disk is then lost. With the leader asleep, nobody may
    say that the write was never there."""
    old = stage.leader
    holder, stranger = stage.others(old)
    await stage.put_until_done(old)
    stage.world.network.cut(old.name, stranger.name)
    for _ in range(3):
        await stage.put_until_done(old)
    old.pause()
    holder.crash()
    holder.wipe()
    stage.cluster.lossy = holder
    stage.world.network.heal()
    stage.unseat(old)
    holder.start()
    await asyncio.sleep(8.0)
    old.resume()
    await stage.put_until_done(old)


def _unseat_for_good(stage: Stage, node: Node) -> None:
    stage.cluster.metadata.cut(node.name)
    stage.cluster.metadata.expire(node.name)


async def _read_here_write_there(stage: Stage, old: Node, seconds: float) -> None:
    """Reads at the old leader, one after the other; reads and writes at the others, as soon as one leads."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def reads(node: Node) -> None:
        while loop.time() < end:
            await stage.get(node, timeout_s=0.1)
            await asyncio.sleep(0.02)

    async def writes(node: Node) -> None:
        while loop.time() < end:
            if node.leads and (await stage.put(node)).status is not Status.OK:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)

    others: list[Any] = [stage.spawn(work(node)) for node in stage.others(old) for work in (reads, writes)]
    await reads(old)
    for each in others:
        await each
