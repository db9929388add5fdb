"""Watches in simulated clusters: each write is shown once and in order, whatever happens to leaders, servers and
ranges."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves.import_steps import ImportStep
from tests.sim.moving.moves import LONG_PAUSE_S, Users, World, at_each_step, first_range, keys_in, play
from tests.sim.moving.moves_accidents import Accident, crash
from tests.sim.moving.test_moves_chaos import drawn
from tests.sim.strikes.faults import Chaos
from tests.sim.strikes.knobs import Knobs
from tests.sim.watchers import Watcher

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS = (*keys_in(SPAN, 6, b"k"), b"k0", b"k1")
COUNTERS = (*keys_in(SPAN, 2, b"c"), b"c0")
SPAN_OF_3 = first_range("p1", 3)
KEYS_OF_3 = keys_in(SPAN_OF_3, 6, b"k")
TWO = Knobs(partitions=2, partition=PartitionConfig(check_every=3))


async def watch(world: World, *keys: bytes | None) -> list[Watcher]:
    """Start users who watch these keys from now to the end."""
    watchers = []
    for number, key in enumerate(keys):
        watcher = Watcher(world.cluster, world.cluster.world.fork(f"watcher {number}"), key)
        await watcher.ready()
        world.at_end.append(watcher.check)
        watchers.append(watcher)
    return watchers


@pytest.mark.parametrize("seed", [0])
def test_partition_joins_and_leaves_while_clients_watch(seed: int) -> None:
    async def join_and_leave(world: World, users: Users) -> None:
        await watch(world, None, b"k3", b"k5")
        await world.join("p2")
        await world.moved()
        await watch(world, None, b"k3")
        await world.leave("p1")
        await world.moved()

    play(seed, join_and_leave, pause_s=LONG_PAUSE_S)


# docs/protocol.md F3
@pytest.mark.parametrize("seed", [0])
def test_partition_joins_and_leaves_while_watchers_are_away(seed: int) -> None:
    async def join_and_leave(world: World, users: Users) -> None:
        away = await watch(world, None, None)
        await asyncio.sleep(0.5)
        for watcher in away:
            watcher.stay_away()
        await world.join("a")  # its name sorts first, and the partitions that get its ranges follow
        await world.moved()
        await asyncio.sleep(0.5)
        await world.leave("a")
        await world.moved()
        await asyncio.sleep(0.5)
        for watcher in away:
            watcher.come_back()

    play(seed, join_and_leave, Knobs(partitions=2), pause_s=LONG_PAUSE_S)


def test_watch_follows_key_to_new_owner_and_back() -> None:
    async def chain(world: World, users: Users) -> None:
        await watch(world, None, *KEYS_OF_3[:2])
        for target in ("p2", "p3", "p1"):
            await world.shift(SPAN_OF_3, target)
            await world.moved()

    play(3, chain, Knobs(partitions=3), keys=KEYS_OF_3, counters=keys_in(SPAN_OF_3, 2, b"c"))


@pytest.mark.parametrize("parties", [("p1",), ("p2",)], ids=("source", "target"))
@pytest.mark.parametrize(
    "step",
    [
        "after freeze",
        "after release",
        f"after {ImportStep.ASK}",
        pytest.param(f"after {ImportStep.FLIP}", marks=pytest.mark.slow),
    ],
)
def test_watches_survive_crash_in_move(step: str, parties: tuple[str, ...]) -> None:
    accident = Accident(step)

    async def move_one(world: World, users: Users) -> None:
        await watch(world, None, KEYS[0])
        accident.strike = lambda: crash(world, parties)
        await world.shift(SPAN, "p2")
        await world.moved()
        assert accident.has_struck, f"the step {step} never happened: {accident.seen}"

    with at_each_step(accident.reached):
        play(len(step), move_one, TWO, users=4, keys=KEYS, counters=COUNTERS)


def test_watches_survive_loss_of_each_leader() -> None:
    async def kill_leaders(world: World, users: Users) -> None:
        await watch(world, None, b"k3")
        for _ in range(3):
            await asyncio.sleep(0.5)
            for partition in world.cluster.partitions:
                leader = world.leader_of(partition)
                if leader is not None:
                    leader.crash()
                    await asyncio.sleep(0.3)
                    leader.start()

    play(5, kill_leaders, Knobs(partitions=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_watches_show_each_write_once_whatever_strikes(seed: int) -> None:
    async def trouble(world: World, users: Users) -> None:
        knobs = world.cluster.knobs
        await watch(world, None, b"k3")
        await world.join("px")
        chaos = Chaos(world.cluster, world.cluster.world.fork("chaos"), list(knobs.faults), knobs.pace_s)
        await chaos.run(knobs.chaos_s)

    knobs = drawn(seed)
    kept = replace(knobs.partition, retention_ms=3_600_000)  # otherwise a watcher may come too late
    play(seed, trouble, replace(knobs, partition=kept), users=4, pause_s=LONG_PAUSE_S)
