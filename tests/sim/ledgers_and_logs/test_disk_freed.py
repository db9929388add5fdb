"""Disks filled with the log's own entries become writable by trimming and reclaim alone, without a restart
(docs/protocol.md, B9, B10 and B20)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from kvstore.partition.state.commands import Put
from tests.sim.judges.operations import Status
from tests.sim.nodes import Node
from tests.sim.stories.scenarios import Stage, knobs, play
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim
SEGMENT = 8 << 10
VALUE = b"v" * 300
"""A number is appended, because the judges identify writes by their values."""


def full_knobs(retention_ms: int = 0) -> Knobs:
    return replace(knobs(roll_entries=25, retention_ms=retention_ms), segment_bytes=SEGMENT, reclaim_s=1.0)


def leave_room(node: Node, segments: int) -> None:
    """Leave space for `segments` segments on the disk, besides the used space and the reserve."""
    disk = node.disk
    used = disk.config.capacity_bytes - disk.free_bytes()
    disk.set_capacity(used + (4 + segments) * SEGMENT)


def is_readonly(node: Node) -> bool:
    return node.served is not None and node.served.bookie.storage.is_readonly


async def fill(stage: Stage, nodes: Sequence[Node], full: int) -> None:
    """Write until `full` of these bookies are read-only."""
    number = 0
    async with asyncio.timeout(60):
        while sum(map(is_readonly, nodes)) < full:
            number += 1
            await stage.ask(Put(b"fill%d" % (number % 7), VALUE + b"%d" % number), stage.cluster.nodes[-1])


async def knock(stage: Stage, node: Node) -> None:
    """Continue to write, without success as long as there is no free space."""
    for number in count():
        await stage.ask(Put(b"knock", VALUE + b"knock%d" % number), node)
        await asyncio.sleep(0.2)


async def expect_writable(stage: Stage, nodes: Sequence[Node], within_s: float) -> None:
    processes = [node.sim.process for node in nodes]
    await stage.until(lambda: not any(map(is_readonly, nodes)), within_s=within_s)
    assert (await stage.put_until_done(stage.cluster.nodes[-1])).status is Status.OK
    assert [node.sim.process for node in nodes] == processes, "no process has ended"


def test_bookie_filled_by_log_becomes_writable_when_log_is_trimmed() -> None:
    """A client continues to write: a new ledger without an entry does not show yet where the ledger before it ends
    (G11)."""

    async def story(stage: Stage) -> None:
        await stage.put_until_done(stage.cluster.nodes[0])
        nodes = stage.cluster.nodes[:1]
        leave_room(nodes[0], 6)
        await fill(stage, nodes, 1)
        knocking = stage.cluster.spawn(knock(stage, stage.cluster.nodes[-1]), name="knock")
        await expect_writable(stage, nodes, 60.0)
        knocking.cancel()

    for seed in range(1, 6):
        play(story, full_knobs(), seed)


def test_cluster_filled_by_log_becomes_writable_when_log_is_trimmed() -> None:
    """Its leaders stay, because no other node could lead either, and continue to trim (docs/protocol.md, G13)."""

    async def story(stage: Stage) -> None:
        await stage.put_until_done(stage.cluster.nodes[0])
        nodes = stage.cluster.nodes
        for node in nodes:
            leave_room(node, 12)
        await fill(stage, nodes, 2)
        knocking = stage.cluster.spawn(knock(stage, nodes[-1]), name="knock")
        await expect_writable(stage, nodes, 90.0)
        knocking.cancel()

    for seed in range(1, 6):
        play(story, full_knobs(retention_ms=20_000), seed)


def test_cluster_with_all_disks_full_serves_again_when_space_is_free() -> None:
    """Retention releases nothing, so space comes from outside."""

    async def story(stage: Stage) -> None:
        await stage.put_until_done(stage.cluster.nodes[0])
        nodes = stage.cluster.nodes
        for node in nodes:
            leave_room(node, 4)
        await fill(stage, nodes, 2)
        await asyncio.sleep(20)
        for node in nodes:
            node.disk.mend()
        await expect_writable(stage, nodes, 10.0)

    for seed in range(1, 6):
        play(story, full_knobs(), seed)
