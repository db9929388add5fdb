"""Reads of a range that changes hands: its source answers them until the ring has flipped, and never once its target
serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import StoreError, Unavailable
from kvstore.partition import commands, custody, partition
from kvstore.partition.carried import Carried, Means
from kvstore.partition.custody import Custody
from kvstore.partition.leader import Leader
from kvstore.partition.replica import DRAIN_S
from kvstore.partition.tokens import Span
from kvstore.ring.hashing import TOKENS
from kvstore.server.dispatch import Dispatcher
from kvstore.types import PartitionId
from tests.sim.moves import Users, World, at_each_step, first_range, keys_in, play
from tests.sim.moves_accidents import asker, crash
from tests.sim.nodes import Node
from tests.sim.test_moves import TWO

pytestmark = pytest.mark.sim

SPAN = first_range("p1", 2)
KEY, OTHER = keys_in(SPAN, 2, b"k")
P1, P2 = PartitionId("p1"), PartitionId("p2")
SEEDS = range(4)
BROKEN_SEEDS = range(4, 20)
"""In few of them the target's next leader stands elsewhere than the source's."""
SLOW_S = 0.5
"""What the metadata store takes for a flip."""
LATE_S = 3.0
"""How long the source's door goes by the former ring: longer than it takes until another leads the target."""
SOON_S = 0.1
APART_S = 0.002


class Watched:
    """A key that one door reads, again and again, while another one writes it."""

    def __init__(self, world: World, reader: Node, writer: Node) -> None:
        self._reader, self._read_by, self._write_by = reader, asker(reader), asker(writer)
        self.waits: list[float] = []
        self._acknowledged = 0
        self._is_over = False
        self._tasks = [world.cluster.spawn(each, name="watched") for each in (self._read(), self._write())]

    async def stop(self) -> None:
        self._is_over = True
        for task in self._tasks:
            await task

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_over:
            least, began = self._acknowledged, loop.time()
            with suppress(StoreError):
                if self._reader.door is not None:
                    shown = int((await self._read_by(commands.get(KEY), None))[0])
                    assert shown >= least, f"{shown} was shown after {least} was acknowledged"
            self.waits.append(loop.time() - began)
            await asyncio.sleep(APART_S)

    async def _write(self) -> None:
        for number in itertools.count(1):
            if self._is_over:
                return
            with suppress(StoreError):
                await self._write_by(commands.put(KEY, b"%d" % number), None)
                self._acknowledged = number
            await asyncio.sleep(APART_S)


def moved_while_read(seed: int, *, strikes: bool = False, flips_slowly: bool = False) -> list[float]:
    """Move the key away while its source's door reads it and another one writes it. Returns how long reads took.
    `strikes`: the target's leader is killed before the flip."""
    waits: list[float] = []
    worlds: list[World] = []

    def reached(means: Means, step: str, move: int) -> None:
        metadata = worlds[0].cluster.metadata
        if flips_slowly and step in ("before flip", "after flip"):
            latency_s = SLOW_S / 2 if step == "before flip" else 0.001
            metadata.config = replace(metadata.config, latency_s=(latency_s, latency_s))
        if strikes and step == "before flip" and not struck:
            struck.append(move)
            asyncio.get_running_loop().call_soon(crash, worlds[0], ["p2"], context=Context())

    async def story(world: World, _users: Users) -> None:
        worlds.append(world)
        source, target = map(world.leader_of, (P1, P2))
        assert source is not None
        writer = next(node for node in world.cluster.nodes if node not in (source, target))
        await asker(writer)(commands.put(KEY, b"0"), None)
        watched = Watched(world, source, writer)
        await world.shift(SPAN, "p2")
        await world.moved()
        await asyncio.sleep(LATE_S)
        await watched.stop()
        waits.extend(watched.waits)

    struck: list[int] = []
    with at_each_step(reached):
        play(seed, story, TWO, users=0, keys=(OTHER,), counters=())
    return waits


def let_the_source_learn_late(patch: pytest.MonkeyPatch) -> None:
    """Its door goes by the former ring for a while, and its rows stay."""
    learn, drop = Dispatcher._on_topology, Carried._drop

    def learned(self: Any) -> None:
        former = self._local.get(P1)
        if former is not None and former.serving:
            asyncio.get_running_loop().call_later(LATE_S, learn, self)
        else:
            learn(self)

    async def dropped(self: Any, leader: Any, move: Any) -> bool:
        await asyncio.sleep(LATE_S)
        return await drop(self, leader, move)

    patch.setattr(Dispatcher, "_on_topology", learned)
    patch.setattr(Carried, "_drop", dropped)


@pytest.mark.parametrize("seed", SEEDS)
def test_reads_do_not_wait_for_the_flip(seed: int) -> None:
    """They may wait for the source's server to read the ring (docs/protocol.md H9), behind what it had asked before:
    half as long as the write takes."""
    assert max(moved_while_read(seed, flips_slowly=True)) < SLOW_S / 2 + SOON_S / 2


@pytest.mark.parametrize("seed", SEEDS)
def test_no_read_is_older_than_a_write_although_the_sources_door_learns_late(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_source_learn_late(monkeypatch)
    moved_while_read(seed, strikes=bool(seed % 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_guard_ends_although_its_leader_was_about_to_let_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits until all is answered, the move comes to its end and leaves the ring; then it leads on."""
    worlds: list[World] = []

    async def answer_slowly(self: Any) -> None:
        await asyncio.sleep(2 * DRAIN_S)

    async def release_in_vain(leader: Leader) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Leader, "_drained", answer_slowly)
            with pytest.raises(Unavailable):
                await leader.release(DRAIN_S)

    def reached(means: Means, step: str, move: int) -> None:
        if step == "before flip":
            leader = means.leading()
            assert leader is not None
            means.env.nursery.spawn(release_in_vain(leader), name="yields")

    async def story(world: World, _users: Users) -> None:
        worlds.append(world)
        door = world.cluster.nodes[0]
        await asker(door)(commands.put(KEY, b"0"), None)
        await world.shift(SPAN, "p2")
        await world.moved()
        await asyncio.sleep(2 * custody.GUARD_S)
        assert (await asker(door)(commands.get(KEY), None))[0] == b"0"

    with at_each_step(reached):
        play(seed, story, TWO, users=0, keys=(OTHER,), counters=())


def serve_at_the_flip(patch: pytest.MonkeyPatch) -> None:
    """The source is not asked to be silent."""

    async def settle(self: Any, leader: Any, move: Any) -> None:
        leader.settle(self.move)

    patch.setattr(Carried, "_settle", settle)


def serve_at_own(patch: pytest.MonkeyPatch) -> None:
    """Nothing is guarded."""
    patch.setattr(Custody, "guard", lambda *_: None)


def forget_the_guard(patch: pytest.MonkeyPatch) -> None:
    """A new leader of the target serves what it owns."""
    patch.setattr(custody, "LINGER_S", 2 * LATE_S)
    patch.setattr(partition, "span_of", lambda move: Span(0, TOKENS))


@pytest.mark.parametrize("broken", [serve_at_the_flip, serve_at_own, forget_the_guard], ids=lambda each: each.__name__)
def test_a_target_that_serves_too_early_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_source_learn_late(monkeypatch)
    broken(monkeypatch)
    for seed in BROKEN_SEEDS:
        try:
            moved_while_read(seed, strikes=broken is forget_the_guard)
        except AssertionError as error:
            if "was shown after" in str(error):
                return
            raise
    pytest.fail(f"nobody has noticed: {broken.__doc__}")
