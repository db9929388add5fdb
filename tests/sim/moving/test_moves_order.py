"""Consecutive writes of one key through one endpoint are done in order, whatever moves meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvstore.errors import StoreError
from kvstore.partition.state import commands
from kvstore.ring import MURMUR3, SLOTS_HASH, Pace, steps
from tests.sim.moving.moves import Users, World, first_range, keys_in, play
from tests.sim.moving.moves_accidents import asker, crash
from tests.sim.moving.test_moves import TWO
from tests.sim.nodes import Node

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEYS = keys_in(SPAN, 2, b"w")
APART_S = 0.0005


class Pipeline:
    """One connection to a node that sends writes without waiting for answers."""

    def __init__(self, world: World, node: Node, keys: Sequence[bytes]) -> None:
        self._world, self._node, self._keys = world, node, keys
        self.versions: dict[bytes, list[int]] = {key: [] for key in keys}
        self._number = 0
        self.is_over = False

    async def run(self) -> None:
        cluster, open_ = self._world.cluster, []
        while not self.is_over:
            await asyncio.sleep(APART_S)
            if self._node.endpoint is None:
                continue
            ask = asker(self._node)
            for key in self._keys:
                self._number += 1
                place = len(self.versions[key])
                self.versions[key].append(0)
                open_.append(cluster.spawn(self._write(ask, key, place), name=f"{self._node.name} {self._number}"))
        for each in open_:
            await each

    async def _write(self, ask: object, key: bytes, place: int) -> None:
        try:
            async with asyncio.timeout(3.0):
                version = await ask(commands.Put(key, b"%d" % place), None)  # type: ignore[operator]
        except (StoreError, TimeoutError):
            return
        self.versions[key][place] = version

    def check(self) -> None:
        for key, found in self.versions.items():
            done = [version for version in found if version]
            assert len(done) > 100
            assert done == sorted(done), f"{self._node.name} {key!r}: a later write was done before an earlier one"


async def there_and_back(world: World, pipelines: Sequence[Pipeline], struck: Sequence[str] = ()) -> None:
    await world.change(lambda ring: steps.set_pace(ring, Pace(bytes_per_s=0)))
    running = [world.cluster.spawn(each.run(), name="pipeline") for each in pipelines]
    for target in ("p2", "p1"):
        await world.shift(SPAN, target)
        if struck:
            await asyncio.sleep(0.05)
            crash(world, struck)
        await world.moved()
    for each in pipelines:
        each.is_over = True
    for task in running:
        await task
    for each in pipelines:
        each.check()


@pytest.mark.parametrize("seed", [0, 14])
def test_consecutive_writes_are_done_in_order_over_a_flip(seed: int) -> None:
    async def story(world: World, users: Users) -> None:
        await there_and_back(world, [Pipeline(world, node, KEYS) for node in world.cluster.nodes])

    play(seed, story, TWO, users=0, keys=KEYS, counters=(), hash=MURMUR3 if seed == 0 else SLOTS_HASH)
