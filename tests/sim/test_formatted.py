"""A cluster whose id disappears from the metadata store, as when another operator's tool formats the store."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.meta import paths
from kvstore.partition.state import commands
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Status
from tests.sim.moving.moves import Users, World, play
from tests.sim.run import Only

pytestmark = pytest.mark.sim


# docs/protocol.md G23
@pytest.mark.parametrize("seed", range(1, 4))
def test_no_leader_serves_while_cluster_is_missing_from_metadata_store(seed: int) -> None:
    async def story(world: World, users: Users) -> None:
        cluster = world.cluster
        (known, _), partitions = await world.store.get(paths.INSTANCE_ID), cluster.partitions
        await world.store.delete(paths.INSTANCE_ID, -1)
        await asyncio.sleep(3.0)
        assert [cluster.leader(each) for each in partitions] == [None] * len(partitions)
        node = cluster.nodes[0]
        random = cluster.world.fork("asked in vain")
        worker = Worker(Only(cluster, node), "asking in vain", random, Identity(random))
        assert (await worker.do(commands.Put(world.keys[0], b"lost"))).status is not Status.OK
        await world.store.create(paths.INSTANCE_ID, b"another")
        await asyncio.sleep(30.0)
        assert [cluster.leader(each) for each in partitions] == [None] * len(partitions)
        await world.store.set(paths.INSTANCE_ID, known, 0)

    play(seed, story, users=2)
