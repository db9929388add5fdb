"""Remains of a partition on a server whose replica moved elsewhere while the server was down."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.errors import MetadataUnavailable
from kvstore.meta import paths
from kvstore.partition.election.leader_znode import Claims
from kvstore.partition.election.ranking import LeaderRecord
from kvstore.partition.election.replica import Replica
from kvstore.ring.replicas import begin_replacing
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, play
from tests.sim.moving.test_moves import TWO
from tests.sim.world.metadata_client import SimStore

pytestmark = pytest.mark.sim

P1, P2 = PartitionId("p1"), PartitionId("p2")


def test_returning_server_drops_only_what_is_no_longer_assigned_to_it() -> None:
    async def leave_while_one_is_down(world: World, users: Users) -> None:
        away = next(node for node in world.cluster.nodes if not {P1, P2} & set(node.leads))
        away.crash()
        strange = PartitionId("of another cluster")
        away.engines.open(strange)
        await world.leave("p2")
        await world.moved()
        await world.retired()
        assert away.engines.find() == [strange, P1, P2]
        away.start()
        deadline = asyncio.get_running_loop().time() + 10.0
        while P2 in away.engines.find():
            assert asyncio.get_running_loop().time() < deadline, "it is still there"
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert away.engines.find() == [strange, P1]

    play(2, leave_while_one_is_down, TWO, users=1)


def test_server_takes_back_claim_of_departed_replica_after_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server and its session continue. The znode named it as long as it ran, and no replica ran for election."""
    release, delete = Claims.release, SimStore.delete
    failing = {"claim": True, "published": True}

    async def release_fails_once(claims: Claims, record: LeaderRecord) -> None:
        if failing["claim"]:
            failing["claim"] = False
            raise MetadataUnavailable("just now")
        await release(claims, record)

    async def delete_fails_once(store: SimStore, path: str, version: int) -> None:
        if "/replicas/" in path and failing["published"]:
            failing["published"] = False
            raise MetadataUnavailable("just now")
        await delete(store, path, version)

    async def to_nobody(replica: Replica) -> None:
        """Fail as if no other server could be reached."""

    async def replace_the_leader(world: World, users: Users) -> None:
        bad = world.leader_of(P1)
        assert bad is not None
        member = world.ring.partitions[P1]
        newcomer = next(node.id for node in world.cluster.nodes if node.id not in member.replicas)
        with monkeypatch.context() as patch:
            patch.setattr(Claims, "release", release_fails_once)
            patch.setattr(SimStore, "delete", delete_fails_once)
            patch.setattr(Replica, "hand_over_to_any", to_nobody)
            await world.change(lambda ring: begin_replacing(ring, P1, newcomer, bad.id))
            deadline = asyncio.get_running_loop().time() + 40.0
            while world.leader_of(P1) in (bad, None):
                assert asyncio.get_running_loop().time() < deadline, "no node leads"
                await asyncio.sleep(0.05)
        assert failing == {"claim": False, "published": False}
        tree = world.cluster.metadata.tree
        while paths.partition_replica(P1, bad.id) in tree.paths() or P1 in bad.engines.find():
            assert asyncio.get_running_loop().time() < deadline, "it is still there"
            await asyncio.sleep(0.05)
        await world.read_ring()

    play(3, replace_the_leader, replace(TWO, nodes=4), users=1)
