"""Whole clusters in which one bookie's files are damaged while it is stopped. Without any command of an operator,
nothing wrong is served and every copy is right in the end (docs/protocol.md, B7, B14, A9, A10)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.bookie.identity import VERSION
from tests.sim.nodes import Node
from tests.sim.recovering.test_lost_disks import CALM, bookie_of, checked, copies_made, short
from tests.sim.stories.scenarios import Stage, play
from tests.sim.workloads import Workload
from tests.sim.world.disk import SimDisk

pytestmark = pytest.mark.sim
SCRUBBED_S = 120.0
"""Maximum seconds until a bookie's first scrub has ended and its findings are repaired."""
SMALL = replace(CALM, segment_bytes=16 << 10, scrub_first_s=30.0)
FLIPS = 25


def files_of(disk: SimDisk) -> list[str]:
    return sorted(path for path in disk.names.now.files if "bookie/" in path)


async def filled(stage: Stage) -> None:
    for number in range(150):
        await stage.put_until_done(stage.leader, b"k%d" % number)
    await asyncio.sleep(10)
    assert not short(stage)


async def struck(stage: Stage, node: Node) -> list[str]:
    """Stop the node and flip bits in its files. Cookies and format numbers are spared: with damage there it would
    not start and would count as lost. Returns the damaged files."""
    await node.stop()
    random, disk = stage.world.fork("flips"), node.disk
    paths = [path for path in files_of(disk) if not path.endswith(VERSION)]
    hit = []
    for _ in range(FLIPS):
        path = random.choice(paths)
        size = disk.names.now.files[path].cache.size
        used = len(bytes(disk.names.now.files[path].cache.data).rstrip(b"\0"))
        if min(size, used) > 20:
            disk.flip_bit(path, random.randrange(8 * 16, 8 * min(size, used)))
            hit.append(path)
    return hit


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bits_flipped_in_stopped_bookie_are_found_and_repaired_under_load(seed: int) -> None:
    async def story(stage: Stage) -> None:
        await filled(stage)
        workload = Workload(stage.cluster, stage.world.fork("workload"), SMALL.load)
        users = [stage.cluster.spawn(each, name="user") for each in workload.workers]
        node = stage.cluster.nodes[seed]
        former = bookie_of(node)
        assert len(set(await struck(stage, node))) > 1
        node.start()
        await stage.until(lambda: node.served is not None)
        assert bookie_of(node) == former
        await asyncio.sleep(10)
        workload.stop()
        for user in users:
            await user
        await asyncio.sleep(SCRUBBED_S)
        assert not short(stage)
        assert copies_made(stage)[0] > 0
        await asyncio.sleep(30)
        assert await checked(stage) == []

    play(story, SMALL, seed)
