"""Once a new leader has listed its ledger, it waits only for the disks of its bookies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from statistics import median
from typing import Any

import pytest

from kvstore.env.nursery import shielded
from kvstore.errors import NoSuchNode
from kvstore.meta import paths
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.partition.leading.leader import Leader
from kvstore.types import ServerId
from tests.sim.stories.scenarios import P, Stage, knobs, play
from tests.sim.test_handover import handing_back, led_by_another, led_by_preferred, write

pytestmark = pytest.mark.sim

START_S_MAX = 0.3


def starts_without_the_metadata_store(stage: Stage, patch: pytest.MonkeyPatch) -> list[float]:
    """Freeze the metadata store from the moment a leader has its log until it serves. Returns the duration of each
    such phase."""
    took: list[float] = []
    start = Leader.start

    async def start_while_it_stands_still(self: Leader, *args: Any) -> None:
        loop, metadata = asyncio.get_running_loop(), stage.cluster.metadata
        began = loop.time()
        metadata.freeze()
        stage.world.network.at(began + 2.0, metadata.thaw)
        await start(self, *args)
        took.append(loop.time() - began)

    patch.setattr(Leader, "start", start_while_it_stands_still)
    return took


@pytest.mark.parametrize("seed", range(1, 6))
def test_next_leader_serves_after_leader_death_while_metadata_store_hangs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stage: Stage) -> None:
        first = await led_by_preferred(stage)
        third = next(node for node in stage.cluster.nodes if node is not first)
        writing = stage.spawn(write(stage, third, 4.0))
        await asyncio.sleep(0.5)
        with monkeypatch.context() as patch:
            took = starts_without_the_metadata_store(stage, patch)
            first.crash()
            await stage.until_led_by_another(first)
        assert took[-1] < START_S_MAX
        await asyncio.sleep(2.0)
        await writing

    play(story, knobs(), seed)


def test_successor_serves_while_metadata_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of five runs counts. If the former leader has just rolled, the ledger created ahead is used, and
    bookies have to ask about the next one."""
    took: list[float] = []

    async def story(stage: Stage) -> None:
        await led_by_another(stage)
        with monkeypatch.context() as patch:
            starts = starts_without_the_metadata_store(stage, patch)
            await led_by_preferred(stage)
        took.append(starts[-1])
        await asyncio.sleep(2.0)

    for seed in range(1, 6):
        play(story, handing_back(), seed)
    assert median(took) < START_S_MAX


def test_stopping_replica_leaves_no_leader_znode_when_claim_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The znode would stay as long as the server's session: no replica could lead, and a removed partition would
    stay."""
    become = Claims._become

    async def story(stage: Stage) -> None:
        stopped: asyncio.Future[ServerId] = asyncio.get_running_loop().create_future()

        async def stop_meanwhile(self: Claims, record: LeaderRecord, *rest: Any) -> bool:
            monkeypatch.setattr(Claims, "_become", become)

            async def on_its_way() -> bool:
                await asyncio.sleep(0.01)
                return await become(self, record, *rest)

            async def stop() -> None:
                await replica.stop(hand_over=False)
                stopped.set_result(record.server)

            (node,) = [node for node in stage.cluster.nodes if node.id == record.server]
            replica = node.replica(P)
            assert replica is not None
            stage.spawn(stop())
            return await shielded(asyncio.ensure_future(on_its_way()))

        first = await led_by_preferred(stage)
        monkeypatch.setattr(Claims, "_become", stop_meanwhile)
        first.crash()
        server = await stopped
        await asyncio.sleep(0.05)
        with suppress(NoSuchNode):
            data, _ = stage.cluster.metadata.tree.get(paths.partition_leader(P))
            assert LeaderRecord.decode(data).server != server, "another node may lead by now"
        for node in stage.cluster.nodes:
            node.crash()
            node.start()

    play(story, knobs())
