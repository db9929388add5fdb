"""How long operations wait while their range changes hands: a few round trips, whatever the metadata store's watches
take."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from kvstore.partition.carried import Means
from kvstore.partition.mover import REST_MAX_S, REST_SHARE
from tests.sim.moves import Users, World, at_each_step, first_range, keys_in, play
from tests.sim.test_moves import TWO, join_one

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS, COUNTERS = keys_in(SPAN, 4, b"k"), keys_in(SPAN, 1, b"c")
MOVES = 6
FROZEN_MEDIAN_S, TOLD_MEDIAN_S = 0.0092, 0.003
"""A round trip takes half a millisecond here, a record of a log two, a change of the ring five, and followers of the
metadata store tell of that up to 150 ms later."""


async def until(is_so: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 30.0
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.0005)


def test_a_range_changes_hands_in_a_few_round_trips_and_all_doors_know_at_once() -> None:
    times: dict[str, list[float]] = {"after freeze": [], "before flip": []}
    told: list[float] = []

    def reached(means: Means, step: str, move: int) -> None:
        if step in times:
            times[step].append(asyncio.get_running_loop().time())

    async def to_and_fro(world: World, users: Users) -> None:
        loop = asyncio.get_running_loop()
        doors = [node.door[1] for node in world.cluster.nodes if node.door is not None]
        for target in ("p2", "p1") * (MOVES // 2):
            await world.shift(SPAN, target)
            await until(lambda target=target: any(door.topology.ring.partition_of(KEYS[0]) == target for door in doors))
            began = loop.time()
            await until(lambda target=target: all(door.topology.ring.partition_of(KEYS[0]) == target for door in doors))
            told.append(loop.time() - began)
            await world.moved()

    with at_each_step(reached):
        play(3, to_and_fro, TWO, users=3, keys=KEYS, counters=COUNTERS)
    frozen = [own - freeze for freeze, own in zip(times["after freeze"], times["before flip"], strict=True)]
    assert sorted(frozen)[MOVES // 2] < FROZEN_MEDIAN_S, frozen
    assert sorted(told)[MOVES // 2] < TOLD_MEDIAN_S, told


def test_a_partition_that_takes_many_ranges_takes_them_one_by_one_and_rests_between() -> None:
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}

    def reached(means: Means, step: str, move: int) -> None:
        now = asyncio.get_running_loop().time()
        if step == "before begin":
            begun.setdefault(move, now)
        elif step == "after flip":
            ended[move] = now

    with at_each_step(reached):
        play(5, join_one, users=1)
    order = sorted(begun, key=begun.__getitem__)
    assert len(order) > 2
    for former, later in itertools.pairwise(order):
        took = ended[former] - begun[former]
        assert begun[later] - ended[former] >= 0.9 * min(REST_SHARE * took, REST_MAX_S)
