"""A target keeps up with the writes of its source: a move ends, and freezes nothing before the target is close."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

from kvstore.partition.moves.import_driver import Means
from kvstore.partition.state import commands
from kvstore.partition.state.tokens import TokenSpan, spans_of
from kvstore.ring import Pace, Ring, steps
from kvstore.types import PartitionId
from tests.sim.moving.moves import Users, World, at_each_step, first_range, hash_for, keys_in, play
from tests.sim.moving.moves_accidents import Accident, asker, crash
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS, COUNTERS = keys_in(SPAN, 4, b"k"), keys_in(SPAN, 1, b"c")
TWO = Knobs(partitions=2)


def staying_keys(ring: Ring, count: int) -> tuple[bytes, ...]:
    """Return keys of p1 that do not move."""
    spans = [span for span in spans_of(ring, PartitionId("p1")) if not span.meets(SPAN)]
    return keys_in(TokenSpan(*spans[0]), count, b"s")


def test_move_ends_soon_while_large_values_are_written_all_the_time() -> None:
    async def beside_large_values(world: World, users: Users) -> None:
        ask, keys = asker(world.cluster.nodes[0]), staying_keys(world.ring, 20)
        is_over = False

        async def write() -> None:
            while not is_over:
                for key in keys:
                    await ask(commands.Put(key, bytes(80_000)), None)

        writing = [world.cluster.spawn(write(), name=f"large values {number}") for number in range(6)]
        await world.shift(SPAN, "p2")
        try:
            await world.moved(2.0)
        finally:
            is_over = True
            for each in writing:
                await each

    play(1, beside_large_values, TWO, users=0, keys=KEYS, counters=COUNTERS)


def test_nothing_is_frozen_before_its_target_is_close() -> None:
    """Many small entries are also much to catch up with. The median of five runs counts: in single runs the target's
    own disk hangs for the time of two reads, which looks like the end of the log."""
    behind: list[int] = []
    worlds: list[World] = []

    def reached(means: Means, step: str, move: int) -> None:
        if step == "after freeze":
            source = worlds[0].leader_of(PartitionId("p1"))
            assert source is not None
            replica = source.replica(PartitionId("p1"))
            carried = [mover._drivers[move] for _, mover in worlds[0].movers() if move in mover._drivers]
            assert replica is not None
            assert replica.state.position is not None
            behind.append(replica.state.position.entry - carried[0]._following.read_to.entry)

    async def far_behind(world: World, users: Users) -> None:
        worlds[:] = [world]
        ask, keys = asker(world.cluster.nodes[0]), keys_in(SPAN, 280, b"m")
        for key in keys:
            await ask(commands.Put(key, bytes(1000)), None)
        await world.change(lambda ring: steps.set_pace(ring, Pace(bytes_per_s=60_000)))
        await world.shift(SPAN, "p2")
        while (await world.read_ring()).moves:
            for key in keys[:50]:
                await ask(commands.Put(key, b"again"), None)

    for seed in range(3, 8):
        with at_each_step(reached):
            play(seed, far_behind, TWO, users=0, keys=KEYS, counters=COUNTERS, hash=hash_for(seed))
    assert len(behind) >= 5
    assert median(behind) < 40


def test_new_leader_of_source_unfreezes_frozen_range_at_once() -> None:
    """It does not wait until it checks its moves again, because writes wait for it."""
    accident = Accident("after freeze")

    async def both_crash(world: World, users: Users) -> None:
        accident.strike = lambda: crash(world, ("p1", "p2"), back_s=8.0)
        loop, took_s = asyncio.get_running_loop(), 0.0
        await world.shift(SPAN, "p2")
        source = None
        while source is None:
            await asyncio.sleep(0.01)
            source = world.leader_of(PartitionId("p1")) if accident.has_struck else None
        began = loop.time()
        while (replica := source.replica(PartitionId("p1"))) is not None and replica.state.ownership.frozen:
            await asyncio.sleep(0.01)
            took_s = loop.time() - began
        assert took_s < 0.2

    with at_each_step(accident.reached):
        play(3, both_crash, TWO, users=2, keys=KEYS, counters=COUNTERS)
