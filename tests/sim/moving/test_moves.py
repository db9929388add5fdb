"""Ranges move during reads and writes: nothing is lost, stale, doubled or resurrected."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.partition.config import PartitionConfig
from kvstore.partition.moves.import_driver import Means
from kvstore.partition.moves.import_steps import ImportStep
from kvstore.partition.state import commands
from kvstore.ring import KeyHash, Pace, steps
from kvstore.server.routing import keys
from tests.sim.moving.moves import (
    LONG_PAUSE_S,
    Users,
    World,
    at_each_step,
    each_hash,
    first_range,
    hash_for,
    keys_in,
    play,
)
from tests.sim.moving.moves_accidents import Accident, asker, crash
from tests.sim.strikes.knobs import Knobs

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS = (*keys_in(SPAN, 8, b"k"), b"k0", b"k1")
COUNTERS = (*keys_in(SPAN, 3, b"c"), b"c0")
SPAN_OF_3 = first_range("p1", 3)
TWO = Knobs(partitions=2, partition=PartitionConfig(check_every=3))

ON_THE_WAY = [
    f"{when} {step}"
    for step in (ImportStep.BEGIN, ImportStep.COPY, ImportStep.FOLLOW, ImportStep.ASK, ImportStep.FLIP)
    for when in ("before", "after")
]
ON_THE_WAY += ["after freeze", "after release", "before drop", "after drop"]


async def join_one(world: World, users: Users) -> None:
    await world.join("p2")
    await world.moved()


@each_hash
def test_partition_joins_under_load(hash: KeyHash) -> None:
    play(0, join_one, pause_s=LONG_PAUSE_S, hash=hash)


# docs/protocol.md M13
@pytest.mark.parametrize(
    "parties",
    [pytest.param(("p1",), marks=pytest.mark.slow), pytest.param(("p2",), marks=pytest.mark.slow), ("p1", "p2")],
    ids=("source", "target", "both"),
)
@pytest.mark.parametrize("step", ON_THE_WAY)
def test_move_survives_crash(step: str, parties: tuple[str, ...]) -> None:
    accident = Accident(step)

    async def move_one(world: World, users: Users) -> None:
        accident.strike = lambda: crash(world, parties)
        await world.shift(SPAN, "p2")
        await world.moved()
        assert accident.has_struck, f"the step {step} never happened: {accident.seen}"

    with at_each_step(accident.reached):
        play(len(step), move_one, TWO, users=4, keys=KEYS, counters=COUNTERS, hash=hash_for(len(step)))


async def chain(world: World, users: Users) -> None:
    """Move a range from p1 to p2, on to p3, and back, each time as soon as possible."""
    for target in ("p2", "p3", "p1"):
        await world.shift(SPAN, target)
        await world.moved()


@each_hash
def test_range_moves_away_and_comes_back(hash: KeyHash) -> None:
    keys, counters = keys_in(SPAN_OF_3, 8, b"k"), keys_in(SPAN_OF_3, 3, b"c")
    play(3, chain, Knobs(partitions=3), keys=keys, counters=counters, hash=hash)


@pytest.mark.slow
def test_chained_joins_end_with_every_key_at_its_owner() -> None:
    """B joins and takes keys of A. C joins and takes keys of B before B has them all. No key is left behind, and
    each is answered by exactly one partition."""

    async def joins(world: World, users: Users) -> None:
        await world.change(lambda ring: steps.set_pace(ring, Pace(parallel=1)))
        await world.join("p2")
        await asyncio.sleep(0.3)
        assert world.ring.moves, "B is still joining"
        await world.join("p3")
        await asyncio.sleep(0.3)
        await world.join("p4")
        await world.moved()
        assert {str(owner) for owner in world.ring.tokens.values()} == {"p1", "p2", "p3", "p4"}

    play(4, joins, pause_s=LONG_PAUSE_S)


# docs/protocol.md M11
@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [each for each in ON_THE_WAY if each.endswith(("begin", "copy", "follow", "freeze", "ask", "release"))]
)
def test_move_cancelled_halfway_leaves_nothing_or_ends(step: str) -> None:
    """The range belongs to the source as before, and nothing of the copy is left. If the range was already released,
    it belongs to the target."""
    accident = Accident(step)

    async def cancel_one(world: World, users: Users) -> None:
        def cancel() -> None:
            world.cluster.spawn(world.change(lambda ring: steps.cancel(ring, list(ring.moves))), name="cancel")

        accident.strike = cancel
        await world.shift(SPAN, "p2")
        await world.moved()
        assert accident.has_struck

    with at_each_step(accident.reached):
        play(len(step), cancel_one, TWO, users=4, keys=KEYS, counters=COUNTERS, hash=hash_for(len(step)))


def test_cancelled_move_without_release_leaves_range_in_place() -> None:
    """It is random if the mover learns of the ring change before the source releases the range. The first run in
    which it does is checked."""
    for seed in range(8, 28):
        accident = Accident("after copy")

        async def cancel_one(world: World, users: Users, accident: Accident = accident) -> None:
            def cancel() -> None:
                world.cluster.spawn(world.change(lambda ring: steps.cancel(ring, list(ring.moves))), name="cancel")

            accident.strike = cancel
            await world.shift(SPAN, "p2")
            await world.moved()
            owner = "p1" if "before give up" in accident.seen else "p2"
            assert world.ring.owner_of(SPAN.first) == world.ring.owner_of(SPAN.last) == owner

        with at_each_step(accident.reached):
            play(seed, cancel_one, TWO, users=4, keys=KEYS, counters=COUNTERS)
        if "before give up" in accident.seen:
            return
    raise AssertionError("no move was cancelled in time")


@pytest.mark.parametrize("through", [0, 2])
def test_join_cancelled_while_partition_pauses_keeps_only_flipped_ranges(through: int) -> None:
    """A range that has changed hands stays there. A partition that has received nothing is removed."""
    flipped: list[int] = []
    cancel = asyncio.Event()

    def reached(means: Means, step: str, move: int) -> None:
        flipped.extend([move] if step == "after flip" else [])
        if step == ("after flip" if through else "after begin") and len(flipped) == through:
            cancel.set()

    async def cancel_a_join(world: World, users: Users) -> None:
        pace = Pace() if through else Pace(bytes_per_s=1)
        await world.change(lambda ring: steps.set_pace(ring, pace))
        await world.join("p3")
        sizes = {move.id: move.size for move in world.ring.moves.values()}
        await cancel.wait()
        await world.change(lambda ring: steps.cancel(ring, list(ring.moves)))
        await world.moved()
        await world.retired()
        assert len(flipped) == through
        assert sum(each.size for each in world.ring.ranges() if each.owner == "p3") == sum(sizes[id] for id in flipped)
        assert ("p3" in world.ring.partitions) == bool(through)

    with at_each_step(reached):
        play(9, cancel_a_join, TWO, users=4)


def test_paused_move_waits_and_continues() -> None:
    async def pause(world: World, users: Users) -> None:
        await world.change(lambda ring: steps.set_pace(ring, Pace(paused=True)))
        await world.shift(SPAN, "p2")
        await asyncio.sleep(3.0)
        assert len((await world.read_ring()).moves) == 1
        await world.change(lambda ring: steps.set_pace(ring, Pace()))
        await world.moved()
        assert world.ring.owner_of(SPAN.first) == "p2"

    play(7, pause, TWO, users=4, keys=KEYS, counters=COUNTERS)


# docs/protocol.md M14
@pytest.mark.slow
def test_scans_during_moves_find_every_key_once() -> None:
    """Scan by token, in pages of several sizes, while partitions join and ranges flip."""
    there = [b"always%d" % number for number in range(80)]

    async def scan(world: World, users: Users) -> None:
        node = world.cluster.nodes[0]
        ask = asker(node)
        for key in there:
            await ask(commands.Put(key, b"x"), None)
        await world.join("p2")
        rounds = 0
        while (await world.read_ring()).moves or rounds < 3:
            found: list[bytes] = []
            cursor, size = 0, (3, 10, 1000)[rounds % 3]
            while not found or cursor:
                cursor, some = await keys.scan(ask, lambda: node.served.topology.ring, cursor, size)  # type: ignore[union-attr]
                found += some
            mine = sorted(key for key in found if key.startswith(b"always"))
            assert mine == sorted(there), f"scan {rounds}: {len(mine)} of {len(there)} keys"
            rounds += 1
        assert rounds > 3

    play(8, scan, pause_s=LONG_PAUSE_S)
