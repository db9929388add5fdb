"""Partitions leave during reads and writes: their keys move to other partitions, and nothing else of them stays."""

from __future__ import annotations

import asyncio
from contextvars import Context

import pytest

from kvstore.meta import paths
from kvstore.partition.moves.import_driver import Means
from kvstore.ring import KeyHash, Pace, PartitionState, steps
from kvstore.server.placement import steward
from kvstore.types import PartitionId
from kvstore.wal.lists import LedgerLists
from kvstore.wal.pins import Pins
from tests.sim.cluster import RuleBroken
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, at_each_step, each_hash, hash_for, play
from tests.sim.moving.moves_accidents import crash
from tests.sim.moving.test_moves import ON_THE_WAY
from tests.sim.moving.test_moves_chaos import drawn
from tests.sim.nodes import Node
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

TWO = Knobs(partitions=2)
CRASHES_APART_S = 0.8
P2 = PartitionId("p2")


async def leave_one(world: World, users: Users) -> None:
    await world.leave("p2")
    await world.moved()
    await world.retired()
    assert world.ring.retired == (P2,)


@each_hash
def test_partition_leaves_under_load(hash: KeyHash) -> None:
    play(1, leave_one, TWO, pause_s=LONG_PAUSE_S, hash=hash)


def test_remains_of_retired_partition_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def remove_nothing(*_: object, **__: object) -> bool:
        return True

    monkeypatch.setattr(steward, "set_apart", remove_nothing)
    monkeypatch.setattr(steward, "remove_rest", remove_nothing)
    with pytest.raises(RuleBroken, match="H5 its list is deleted first"):
        play(1, leave_one, TWO, pause_s=LONG_PAUSE_S)


def test_log_deleted_before_its_partition_has_retired_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def remove_early(world: World, users: Users) -> None:
        await world.leave("p2")
        await world.store.set(paths.partition_log(P2), b'{"format":1,"ledgers":[]}', -1)
        await asyncio.sleep(1.0)

    with pytest.raises(RuleBroken, match="H5 only retired partitions lose their list"):
        play(1, remove_early, TWO)


def test_partition_stays_retired_without_leader_while_its_log_is_pinned() -> None:
    async def leave_while_held(world: World, users: Users) -> None:
        lists = LedgerLists(world.store)
        listed, _ = await lists.read(P2)
        pins = Pins(world.store, lists)
        await pins.hold(P2, "reader", listed.ledgers[-1].id)
        await world.leave("p2")
        await world.moved()
        await asyncio.sleep(5.0)
        ring = await world.read_ring()
        assert ring.partitions[P2].state is PartitionState.RETIRED
        assert [node.served.leaderless() for node in world.cluster.nodes if node.served is not None] == [[], [], []]
        await pins.release(P2, "reader")
        await world.retired()

    play(5, leave_while_held, TWO, users=2, pause_s=LONG_PAUSE_S)


class Strikes:
    """Crashes the leaders of the partitions of a move once at each step, with enough time between crashes to
    recover."""

    def __init__(self, parties: tuple[str, ...]) -> None:
        self.left = list(ON_THE_WAY)
        self.world: World | None = None
        self._parties = parties
        self._not_before = 0.0

    def reached(self, means: Means, step: str, number: int) -> None:
        loop = asyncio.get_running_loop()
        if self.world is None or step not in self.left or loop.time() < self._not_before:
            return
        move = means.rings.ring.moves.get(number)  # type: ignore[call-overload]
        if move is not None:
            self.left.remove(step)
            self._not_before = loop.time() + CRASHES_APART_S
            names = [str(getattr(move, party)) for party in self._parties]
            loop.call_soon(crash, self.world, names, context=Context())


@pytest.mark.slow
@pytest.mark.parametrize("parties", [("source",), ("target",), ("source", "target")], ids="+".join)
def test_leave_survives_crash_at_each_step(parties: tuple[str, ...]) -> None:
    strikes = Strikes(parties)

    async def leave_in_trouble(world: World, users: Users) -> None:
        strikes.world = world
        await world.change(lambda ring: steps.set_pace(ring, Pace(parallel=1)))
        await leave_one(world, users)
        assert strikes.left == []

    with at_each_step(strikes.reached):
        play(2, leave_in_trouble, TWO, users=4, pause_s=LONG_PAUSE_S, hash=hash_for(len(parties)))


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("n1",), ("n1", "n2", "n3")], ids="+".join)
def test_retired_partition_goes_when_nodes_crash_after_each_of_its_writes(victims: tuple[str, ...]) -> None:
    """Node n1 performs the removal."""
    written: list[str] = []

    async def leave_in_trouble(world: World, users: Users) -> None:
        cluster = world.cluster

        def wrote(path: str, old: bytes | None, new: bytes | None) -> None:
            ring, ledger = cluster.rules.ring, paths.ledger_of(path)
            owner = cluster.rules.partition_of.get(ledger) if ledger is not None else None
            if ring is None or P2 not in ring.partitions or ring.partitions[P2].state is not PartitionState.RETIRED:
                return
            if owner == P2 or path.startswith(paths.partition(P2)) or path == paths.RING:
                written.append(path)
                cluster.world.loop.call_soon(strike, context=Context())

        def strike() -> None:
            for node in cluster.nodes:
                if node.name in victims and node.sim.is_running:
                    restart(world, node)

        cluster.metadata.tree.observers.append(wrote)
        await leave_one(world, users)
        assert P2 not in await world.store.children(paths.PARTITIONS)

    play(3, leave_in_trouble, TWO, users=4, pause_s=LONG_PAUSE_S)
    assert written.count(paths.partition_log(P2)) >= 2, "the list was emptied, then deleted"


def restart(world: World, node: Node) -> None:
    node.crash()
    world.cluster.world.loop.call_later(0.4, node.start, context=Context())


@pytest.mark.slow
def test_chained_joins_and_leaves_end_with_every_key_at_its_owner() -> None:
    """One partition joins while another leaves. The new partition leaves before it has everything, and the other
    leave is cancelled."""

    async def chain(world: World, users: Users) -> None:
        await world.join("p3")
        await world.leave("p2")
        await asyncio.sleep(0.4)
        assert world.ring.moves, "p2 is still leaving"
        await world.join("p4")
        await asyncio.sleep(0.4)
        await world.leave("p3")
        await world.moved()
        await world.retired()
        assert {str(owner) for owner in world.ring.tokens.values()} == {"p1", "p4"}
        await world.leave("p1")
        await asyncio.sleep(0.3)
        await world.change(lambda ring: steps.cancel(ring, list(ring.moves)))
        await world.moved()
        await world.retired()
        assert "p1" in world.ring.partitions

    play(4, chain, TWO, pause_s=LONG_PAUSE_S)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20])
def test_leaves_complete_whatever_strikes(seed: int) -> None:
    async def leave_in_trouble(world: World, users: Users) -> None:
        cluster = world.cluster
        await world.join("px")
        await world.leave("p1")
        await Chaos(cluster, cluster.world.fork("chaos"), list(cluster.knobs.faults), cluster.knobs.pace_s).run(
            cluster.knobs.chaos_s
        )

    play(seed, leave_in_trouble, drawn(seed), users=4, pause_s=LONG_PAUSE_S)
