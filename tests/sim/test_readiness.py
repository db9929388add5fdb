"""The servers that a load balancer finds when a partition cannot be led: all servers, because they answer for the
other partitions."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvstore.errors import NoSuchLedger, Unavailable
from kvstore.meta import paths
from kvstore.partition.partition import Partition
from kvstore.partition.state import commands
from kvstore.server import app, composition
from kvstore.types import LedgerId, PartitionId, ServerId
from kvstore.wal.log import PartitionLogs
from tests.sim.clients import Identity, Worker
from tests.sim.judges.operations import Status
from tests.sim.moving.moves import Users, World, play
from tests.sim.moving.test_moves import TWO
from tests.sim.nodes import STOP_S_MAX, Node
from tests.sim.recovering.cases import until
from tests.sim.run import Only

pytestmark = pytest.mark.sim

P1, P2 = PartitionId("p1"), PartitionId("p2")


def test_partition_that_cannot_be_led_makes_no_server_unready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A former version made all servers unready, so that clients could not reach the other partitions either."""
    open_as_leader = PartitionLogs.open_as_leader

    async def stuck(logs: PartitionLogs, partition: PartitionId, *rest: Any) -> Any:
        if partition == P2:
            raise Unavailable("the log of p2 cannot be opened in this test")
        return await open_as_leader(logs, partition, *rest)

    async def lose_one(world: World, users: Users) -> None:
        monkeypatch.setattr(PartitionLogs, "open_as_leader", stuck)
        leader = world.leader_of(P2)
        assert leader is not None
        leader.crash()
        await asyncio.sleep(10.0)
        leader.start()
        await asyncio.sleep(10.0)
        nodes = world.cluster.nodes
        assert [served(node).leaderless() for node in nodes] == [[P2]] * 3
        assert [served(node).statistics()["server"]["partitions_without_leader"] for node in nodes] == [1] * 3
        assert [served(node).not_ready() for node in nodes] == [[]] * 3
        await all_keys_of_p1_answer(world)
        monkeypatch.setattr(PartitionLogs, "open_as_leader", open_as_leader)

    play(3, lose_one, TWO, users=0)


async def all_keys_of_p1_answer(world: World) -> None:
    random = world.cluster.world.fork("asked in p1")
    for node in world.cluster.nodes:
        worker = Worker(Only(world.cluster, node), f"asking {node.name}", random, Identity(random))
        for key in [key for key in world.keys if world.ring.partition_of(key) == P1]:
            assert (await worker.do(commands.Get(key))).status is Status.OK


def test_server_is_unready_while_it_starts_and_once_it_drains() -> None:
    async def drain(world: World, users: Users) -> None:
        node = world.cluster.nodes[0]
        await served(node).begin_stopping()
        assert served(node).not_ready() == ["draining"]
        assert served(world.cluster.nodes[1]).not_ready() == []

    play(4, drain, TWO, users=0)


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_drain_is_undone_and_node_leads_again(seed: int) -> None:
    """The drain may still be in progress. No user data is lost and no answer is wrong meanwhile."""

    async def story(world: World, users: Users) -> None:
        drained = world.leader_of(P1)
        assert drained is not None
        node, others = served(drained), [each for each in world.cluster.nodes if each is not drained]
        draining = asyncio.create_task(node.drain())
        await asyncio.sleep(0.0 if seed == 5 else 5.0)
        if seed != 5:
            assert (node.not_ready(), node.hosting.statistics()) == (["draining"], {})
        assert await node.undrain()
        assert P1 in await draining
        assert not await node.undrain()
        assert node.not_ready() == []
        assert sorted(node.hosting.statistics()) == [P1, P2]
        for other in others:
            await served(other).drain()
        await until(lambda: set(node.hosting.leads) == {P1, P2})
        for other in others:
            assert await served(other).undrain()

    play(seed, story, TWO, users=4)


# docs/protocol.md P23
def test_node_cut_from_metadata_store_while_draining_leaves_nothing_behind() -> None:
    """The node continues to run, and so does its session. In a former version, its name stayed as the leader's and
    no replica led until it was restarted. The positions that its replicas had published stayed in any case, and held
    their logs as long as it ran."""

    async def story(world: World, users: Users) -> None:
        drained, metadata = world.leader_of(P1), world.cluster.metadata
        assert drained is not None
        node, server = served(drained), ServerId(drained.name)

        def published() -> list[bool]:
            return [server in metadata.tree.children(paths.partition_replicas(each)) for each in (P1, P2)]

        await until(lambda: published() == [True, True])
        session = node.store.session
        metadata.cut(drained.name, silently=False)
        await node.drain()
        metadata.mend(drained.name)
        await until(lambda: world.leader_of(P1) is not None, within_s=20.0)
        await until(lambda: published() == [False, False], within_s=20.0)
        assert node.store.session == session, "its published positions outlive its session"
        assert await node.undrain()
        await until(lambda: published() == [True, True], within_s=20.0)

    play(10, story, TWO, users=0)


def test_stopping_node_is_not_undrained() -> None:
    async def story(world: World, users: Users) -> None:
        node = served(world.cluster.nodes[0])
        await node.drain()
        await node.begin_stopping()
        with pytest.raises(Unavailable, match="is stopping"):
            await node.undrain()
        assert node.not_ready() == ["draining"]
        world.cluster.nodes[0].crash()
        world.cluster.nodes[0].start()

    play(8, story, TWO, users=0)


@pytest.mark.parametrize("is_drained_first", [True, False])
def test_node_drained_and_stopped_together_hands_over_once(
    is_drained_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a former version each replica was stopped twice at once. Its second stop ended the process, with all other
    leases."""
    stop = Partition.stop

    async def slowly(partition: Partition, **how: bool) -> None:
        await asyncio.sleep(1.0)
        await stop(partition, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Partition, "stop", slowly)

    async def story(world: World, users: Users) -> None:
        machine = world.leader_of(P1)
        assert machine is not None
        node, drains, began = served(machine), asyncio.Event(), asyncio.get_running_loop().time()

        async def note(is_serving: bool) -> None:
            drains.set()

        node.on_serving.append(note)
        if is_drained_first:
            draining = asyncio.create_task(node.drain())
            await drains.wait()
            stopping = asyncio.create_task(machine.stop())
            assert P1 in await draining
        else:
            stopping = asyncio.create_task(machine.stop())
            await drains.wait()
            with pytest.raises(Unavailable, match="is stopping"):
                await node.drain()
        await stopping
        assert (machine.sim.is_running, node.hosting.statistics()) == (False, {})
        assert asyncio.get_running_loop().time() - began < STOP_S_MAX, "the node had to be killed"
        machine.start()

    play(9, story, TWO, users=4)


def test_starting_node_is_not_drained_and_answers_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's endpoint is open before its replicas begin. In a former version a drain at that moment reported
    that everything is handed over, and ended the node."""
    host, seen = composition._host, list[ServerId]()

    async def while_it_starts(node: app.Node, stack: AsyncExitStack) -> None:
        for change in (node.drain, node.undrain):
            with pytest.raises(Unavailable, match="is starting"):
                await change()
        assert (node.not_ready(), node.is_draining) == (["starting"], False)
        assert (node.replicas(), node.load_sampler.loads(), node.progress.by_move()) == ({}, [], {})
        with pytest.raises(NoSuchLedger):
            await node.ledger_survey.ledger(LedgerId(1 << 40))
        seen.append(node.id)
        await host(node, stack)

    monkeypatch.setattr(composition, "_host", while_it_starts)

    async def story(world: World, users: Users) -> None:
        assert len(seen) == 3

    play(10, story, TWO, users=0)


def served(node: Node) -> Any:
    assert node.served is not None
    return node.served
