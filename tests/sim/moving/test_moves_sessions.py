"""A session sees everything that it has seen before, at every replica, while ranges move away and come back."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import StoreError
from kvstore.partition.state import commands
from kvstore.partition.state.commands import Level
from kvstore.ring import KeyHash
from kvstore.server.cluster.ring_store import RingStore
from kvstore.types import PartitionId
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Status
from tests.sim.moving.moves import Users, World, each_hash, first_range, keys_in, play
from tests.sim.moving.moves_accidents import asker
from tests.sim.moving.test_moves import TWO

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
(KEY,) = keys_in(SPAN, 1, b"k")


@each_hash
def test_sessions_never_go_back_on_replica_that_was_down_during_moves(hash: KeyHash) -> None:
    answers: list[object] = []

    async def away_and_back(world: World, users: Users) -> None:
        cluster = world.cluster
        worker = Worker(cluster, "session", cluster.world.fork("session"), Identity(cluster.world.fork("id")))
        while not worker.identity.seen_ms:
            await worker.do(commands.Get(KEY))
        assert (await worker.do(commands.Put(KEY, b"before"))).status is Status.OK
        await asyncio.sleep(1.0)
        away = next(node for node in cluster.nodes if not {PartitionId("p1"), PartitionId("p2")} & set(node.leads))
        away.crash()
        await world.shift(SPAN, "p2")
        await world.moved()
        written = await worker.do(commands.Put(KEY, b"meanwhile"))
        assert written.status is Status.OK
        await world.shift(SPAN, "p1")
        await world.moved()
        ring = await world.read_ring()
        away.start()
        deadline = asyncio.get_running_loop().time() + 10.0
        while asyncio.get_running_loop().time() < deadline and sum(isinstance(each, int) for each in answers) < 20:
            await asyncio.sleep(0.001)
            if away.endpoint is None or away.endpoint[1].topology.ring.routed != ring.routed:
                continue
            try:
                # A client with this ring, which has seen p1 only in its former state.
                asked = asker(away, ring.routed)(commands.Get(KEY, Level.SESSION, 1), None)
                record = await asyncio.wait_for(asked, 1.0)
            except (StoreError, TimeoutError) as error:
                answers.append(error)
                continue
            assert record is not None
            assert record[1] >= written.result, f"{record} is older than {written}, after {answers}"
            answers.append(record[1])

    play(5, away_and_back, TWO, users=0, keys=(KEY,), counters=(), hash=hash)
    assert any(isinstance(each, int) for each in answers)
    assert any(isinstance(each, StoreError) for each in answers), "it was never read before it had caught up"


def test_replica_does_not_answer_by_ring_older_than_its_ownership(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a session would see the range's third owner, take it for the first, and ask the second next."""
    monkeypatch.setattr(RingStore, "hint", lambda self, routed: None)  # other servers cannot notify it either

    async def away_and_back(world: World, users: Users) -> None:
        cluster = world.cluster
        away = next(node for node in cluster.nodes if not {PartitionId("p1"), PartitionId("p2")} & set(node.leads))
        worker = Worker(cluster, "writer", cluster.world.fork("writer"), Identity(cluster.world.fork("id")))
        assert (await worker.do(commands.Put(KEY, b"before"), with_id=False)).status is Status.OK
        await asyncio.sleep(2)  # until it has what the others had when it started
        cluster.metadata.cut(away.name, silently=False)
        for target in ("p2", "p1"):
            await world.shift(SPAN, target)
            await world.moved()
        replica = away.replica(PartitionId("p1"))
        assert replica is not None
        assert away.endpoint is not None
        deadline = asyncio.get_running_loop().time() + 10.0
        while not replica.state.ownership.newest:
            assert asyncio.get_running_loop().time() < deadline, "the replica does not follow"
            await asyncio.sleep(0.01)
        assert away.endpoint[1].topology.ring.routed == 1
        for level in (Level.STALE, Level.SESSION, Level.LINEARIZABLE):
            with pytest.raises(StoreError):
                await asker(away, 1)(commands.Get(KEY, level), None)
        cluster.metadata.mend(away.name)
        deadline = asyncio.get_running_loop().time() + 10.0
        while away.endpoint[1].topology.ring.routed == 1:
            assert asyncio.get_running_loop().time() < deadline, "the ring is not read"
            await asyncio.sleep(0.01)
        assert await asker(away)(commands.Get(KEY, Level.STALE), None)

    play(6, away_and_back, TWO, users=0, keys=(KEY,), counters=())
